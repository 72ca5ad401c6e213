"""The start-up path on the real vLLM: every kind of process carries its patches, or refuses.

Each test runs a Python of this environment, so the installed ``.pth`` line is what starts it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from patches import bootstrap
from patches.framework import rundir

ENTRY = "vllm.entrypoints.launchers.api_server.entry"


def python(code: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter of this environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env={**kept, **env}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def states(code: str, **env: str) -> Any:
    """Run ``code`` and return what its last line of output says, as JSON."""
    ended = python(code, **env)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


SHOW = """
import json
from patches.framework import process
application = process.current().application
print(json.dumps({name: state.state.value for name, state in application.states.items()}))
"""


def test_importing_vllm_applies_the_patches_of_what_is_imported() -> None:
    found = states(f"import {ENTRY}\n{SHOW}")
    assert found["process_roster"] == "applied"
    assert found["serving_gate"] == "applied"
    assert found["lmcache_roster"] == "pending"


def test_vllm_finds_the_plugin_and_the_plugin_verifies() -> None:
    code = f"""
    import json
    import {ENTRY}
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from patches.framework import process
    print(json.dumps(process.current().verified))
    """
    assert states(code) is True


def test_a_second_start_and_a_second_verification_change_nothing() -> None:
    code = f"""
    import json, patches.bootstrap, patches.plugin
    import {ENTRY} as entry
    before = entry.serve_http
    patches.bootstrap.start(); patches.plugin.verify(); patches.plugin.verify()
    print(json.dumps(entry.serve_http is before and not hasattr(before.__wrapped__, "__wrapped__")))
    """
    assert states(code) is True


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_process_carries_the_patches(method: str) -> None:
    code = f"""
    import json, multiprocessing
    def look(queue):
        import {ENTRY} as entry
        from patches.framework import process
        state = process.current()
        state.verify()
        queue.put([hasattr(entry.serve_http, "__wrapped__"), state.verified, state.identity])
    """
    ended = _child(code, method)
    assert ended == [True, True, {}]


def _child(code: str, method: str) -> Any:
    """Run ``look`` of ``code`` in a child started by ``method``. Spawn needs a real file to import it from."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "parent.py"
        script.write_text(
            textwrap.dedent(code)
            + textwrap.dedent(
                f"""
                if __name__ == "__main__":
                    import vllm.v1.engine.core
                    from patches.framework import process
                    from patches.framework.records import Role
                    process.current().take_role(Role.LAUNCHER)
                    context = multiprocessing.get_context("{method}")
                    queue = context.Queue()
                    child = context.Process(target=look, args=(queue,))
                    child.start()
                    print(json.dumps(queue.get(timeout=100)))
                    child.join()
                """
            )
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_"))}
        ended = subprocess.run(
            [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=180, check=False
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_without_the_start_up_line_the_plugin_refuses() -> None:
    """``-S`` keeps site and with it every .pth line away; the packages are put on the path by hand."""
    folders = [entry for entry in sys.path if entry]
    code = f"""
    import sys; sys.path[:] = {folders!r}
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    """
    ended = python(code, "-S")
    assert ended.returncode != 0
    assert "BootstrapError: the start-up hooks did not run in this process" in ended.stderr


def test_a_plugin_list_that_does_not_name_us_is_refused_at_the_first_import() -> None:
    ended = python("import vllm", VLLM_PLUGINS="lora_filesystem_resolver")
    assert ended.returncode != 0
    assert "Add vllm_splint to VLLM_PLUGINS" in ended.stderr


def test_a_plugin_list_that_names_us_is_fine() -> None:
    assert python("import vllm", VLLM_PLUGINS="lora_filesystem_resolver,vllm_splint").returncode == 0


@pytest.mark.parametrize("name", ["VLLM_USE_RUST_FRONTEND", "LMCACHE_USE_UPSTREAM_MP"])
def test_what_takes_work_out_of_reach_is_refused_with_the_reason(name: str) -> None:
    ended = python("import vllm", **{name: "1"})
    assert ended.returncode != 0
    assert f"EnvironmentRefusedError: {name}=1" in ended.stderr


def test_an_unknown_setting_is_refused_and_names_the_nearest() -> None:
    ended = python("import vllm", SPLINT_MDOE="off")
    assert ended.returncode != 0
    assert "Did you mean SPLINT_MODE?" in ended.stderr


TAMPER = """
import json, pathlib, shutil, sys
from patches.framework import fingerprints
folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else {folder!r})
for path in fingerprints.REVIEWED_FOLDER.glob("*.json"):
    data = json.loads(path.read_text())
    data["files"] = {{}}
    changed = [name for name in data["targets"] if name.endswith("serve_http")]
    data["targets"] |= dict.fromkeys(changed, "0" * 64)
    (folder / path.name).write_text(json.dumps(data))
fingerprints.REVIEWED_FOLDER = folder
"""


def test_source_that_nobody_reviewed_is_refused_and_rolled_back_and_leaves_word(tmp_path: Path) -> None:
    code = (
        TAMPER.format(folder=str(tmp_path))
        + f"""
import json
try:
    import {ENTRY}
except Exception as error:
    from patches.framework import process
    from patches.plugin import verify
    refused = []
    for attempt in (verify, lambda: __import__("vllm.v1.executor.multiproc_executor")):
        try:
            attempt()
        except Exception as again:
            refused.append(type(again).__name__)
    print(json.dumps([type(error).__name__, str(error), refused]))
"""
    )
    run_dir = rundir.prepare(tmp_path / "run")
    kind, message, refused = states(code, SPLINT_RUN_DIR=str(run_dir))
    assert kind == "FingerprintError"
    assert "vllm.entrypoints.launchers.launcher:serve_http" in message
    assert refused == ["FingerprintError", "FingerprintError"], "what follows must be refused too"
    (word,) = (run_dir / rundir.REFUSED).iterdir()
    assert (rundir.read_json(word) or {})["kind"] == "FingerprintError"


def test_report_mode_applies_what_fits_and_says_what_does_not(tmp_path: Path) -> None:
    code = TAMPER.format(folder=str(tmp_path)) + f"import {ENTRY}\n{SHOW}"
    found = states(code, SPLINT_MODE="report")
    assert found["serving_gate"] == "refused"
    assert found["process_roster"] == "applied"


def test_off_is_stock() -> None:
    code = f"""
    import json, sys
    import {ENTRY} as entry
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    missing = [name for name in {bootstrap.SHARED!r} if name not in sys.modules]
    print(json.dumps([hasattr(entry.serve_http, "__wrapped__"), "patches.framework" in sys.modules, missing]))
    """
    assert states(code, SPLINT_MODE="off") == [False, False, []]


def test_a_process_that_is_not_vllms_loads_nothing_of_ours() -> None:
    code = """
    import json, sys, email, http.client
    ours = sorted(name for name in sys.modules if name.startswith(("patches", "wrapt")))
    print(json.dumps(ours))
    """
    assert set(states(code)) <= {"patches", "patches.bootstrap", "patches.supervision"}


def test_a_process_that_is_not_vllms_pays_under_three_milliseconds() -> None:
    """Of processor time, which other work on the machine does not stretch; median of 41 pairs of starts, in turn."""

    def start(mode: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "pass"], env={**os.environ, "SPLINT_MODE": mode}, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(start("enforce"), start("off")) for _ in range(41)]
    cost = sorted(ours - stock for ours, stock in pairs)[len(pairs) // 2]
    print(f"interpreter start: {cost * 1000:.2f} ms more than with SPLINT_MODE=off")
    assert cost < 0.003
