"""The checks of system, installation and settings: each passes where it should and names what is wrong."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint import serve
from entrypoint.checking import CheckFailedError, DoesNotApplyError, Evidence, InTime
from entrypoint.preflight import packages, runner
from entrypoint.preflight.check import REFUSE, WARN, Check, always
from entrypoint.preflight.checks import (
    CHECKS,
    caches,
    descriptors,
    hash_seed,
    kv_dtype,
    lmcache_ops,
    port,
    releases,
    shm,
    torch_abi,
)
from entrypoint.preflight.checks import model as model_check
from entrypoint.preflight.subject import Subject
from patches.framework.arguments import Arguments
from patches.framework.errors import SettingError

MP = ("--kv-transfer-config", '{"kv_connector": "LMCacheMPConnector"}')
V1 = ("--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}')


def subject(*words: str, **environ: str) -> Subject:
    return Subject(Arguments(words or ["m"]), environ)


def model(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_every_check_has_a_module_of_its_name() -> None:
    names = {path.stem for path in Path(shm.__file__).parent.glob("*.py")} - {"__init__"}
    assert {check.id for check in CHECKS} == names
    assert len({check.proves for check in CHECKS}) == len(CHECKS)


# --- shared memory, descriptors, folders, port


def test_dockers_default_of_shared_memory_is_too_little_for_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=16384, f_frsize=4096))
    with pytest.raises(CheckFailedError, match="64 MiB free in /dev/shm; wanted 240 MiB"):
        shm.CHECK.run(subject("m", "-tp", "2"))


@pytest.mark.parametrize(
    ("vllm", "words", "applies"), [("0.32.0", (), False), ("0.32.0", ("-tp", "2"), True), ("0.32.0+cpu", (), True)]
)
def test_shared_memory_matters_where_workers_are_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, vllm: str, words: tuple[str, ...], applies: bool
) -> None:
    monkeypatch.setattr("entrypoint.preflight.subject.installed_version", lambda _: vllm)
    assert (shm.CHECK.applies(subject("m", *words)) is None) is applies


def test_shared_memory_that_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1 << 20, f_frsize=4096))
    assert shm.CHECK.run(subject("m", "-tp", "2"))["free_mib"] == 4096


def test_workers_of_this_node_are_counted() -> None:
    assert subject("m", "-tp", "2", "-dp", "4", "-dpl", "2").workers == 4


@pytest.mark.parametrize(
    ("limits", "enough"), [((1024, 4096), False), ((1024, 1 << 20), True), ((20000, 20000), True), ((-1, -1), True)]
)
def test_file_descriptors_as_vllm_will_have_them(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], enough: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    if enough:
        descriptors.CHECK.run(subject())
        return
    with pytest.raises(CheckFailedError, match="1024 file descriptors"):
        descriptors.CHECK.run(subject())


def test_folders_that_can_be_written_are_listed(tmp_path: Path) -> None:
    found = caches.CHECK.run(subject(str(tmp_path), HOME=str(tmp_path), TMPDIR=str(tmp_path)))
    assert found == {"TMPDIR": str(tmp_path), "VLLM_CACHE_ROOT": f"{tmp_path}/.cache/vllm"}


def test_a_folder_that_can_not_be_written_is_named_with_its_variable(tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match="VLLM_CACHE_ROOT is /dev/null/x") as failure:
        caches.CHECK.run(subject(str(tmp_path), HOME=str(tmp_path), VLLM_CACHE_ROOT="/dev/null/x"))
    assert "or set VLLM_CACHE_ROOT to one" in failure.value.hint


@pytest.mark.parametrize(("environ", "downloads"), [({}, True), ({"HF_HUB_OFFLINE": "1"}, False)])
def test_a_model_that_has_to_be_downloaded_needs_the_hubs_folder(
    tmp_path: Path, environ: dict[str, str], downloads: bool
) -> None:
    assert ("HF_HOME" in caches.CHECK.run(subject("org/m", HOME=str(tmp_path), **environ))) is downloads


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_found(taken_port: int) -> None:
    with pytest.raises(CheckFailedError, match=f"port {taken_port} of 127.0.0.1: Address already in use"):
        port.CHECK.run(subject("m", "--host", "127.0.0.1", "--port", str(taken_port)))


def test_a_port_in_a_config_file_is_looked_at(taken_port: int, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(f"port: {taken_port}\nhost: 127.0.0.1\n")
    with pytest.raises(CheckFailedError, match="Address already in use"):
        port.CHECK.run(subject("m", "--config", str(tmp_path / "serve.yaml")))


@pytest.mark.parametrize("flag", ["--headless", "--uds=/run/x"])
def test_a_server_without_a_port_needs_none(flag: str) -> None:
    assert port.CHECK.applies(subject("m", flag)) is not None


@pytest.mark.parametrize("path", ["/no/such/model", "./none", "~/none"])
def test_a_model_folder_that_is_absent_is_refused(path: str) -> None:
    with pytest.raises(CheckFailedError, match=r"no model at .*(model|none)"):
        model_check.CHECK.run(subject(path))


def test_names_on_a_hub_are_not_looked_for_on_disk() -> None:
    assert model_check.CHECK.applies(subject("Qwen/Qwen3-0.6B")) == "a name on a hub"


# --- what is installed


def test_the_installed_code_loads_beside_the_installed_torch() -> None:
    found = torch_abi.CHECK.run(subject("m", **os.environ))
    assert len(found["seconds"]) == 1


def test_lmcaches_operations_load_here() -> None:
    assert lmcache_ops.CHECK.run(subject("m", *MP, **os.environ))


def test_an_lmcache_without_compiled_code_is_not_said_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "native", lambda *_: [])
    with pytest.raises(DoesNotApplyError, match="has no compiled code"):
        lmcache_ops.CHECK.run(subject("m", *MP))


def test_lmcache_is_not_loaded_for_a_server_without_it() -> None:
    assert lmcache_ops.CHECK.applies(subject("m")) == "no LMCache connector"


@pytest.mark.parametrize("words", [MP, V1, ("--kv-offloading-backend", "lmcache")])
def test_an_lmcache_connector_without_lmcache_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(
        "entrypoint.preflight.subject.installed_version", lambda name: "0.32.0" if name == "vllm" else None
    )
    without = subject("m", *words)
    assert lmcache_ops.CHECK.applies(without) is None
    with pytest.raises(CheckFailedError, match="no LMCache; wanted the package for LMCache"):
        lmcache_ops.CHECK.run(without)


def test_compiled_code_that_does_not_load_is_refused_with_the_loaders_words(tmp_path: Path) -> None:
    (tmp_path / "_C.abi3.so").write_bytes(b"no library")
    with pytest.raises(CheckFailedError, match=r"_C\.abi3\.so does not load: .*(invalid ELF header|file too short)"):
        torch_abi.load([tmp_path / "_C.abi3.so"], subject("m", **os.environ), "hint")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="CUDA's libraries are here")
def test_code_for_a_library_that_is_absent_is_refused() -> None:
    """LMCache's operations on GPU memory, on a machine without CUDA."""
    [file] = packages.native("lmcache", "cuda_ops.*.so")
    with pytest.raises(CheckFailedError, match=r"cannot open shared object file"):
        torch_abi.load([file], subject("m", **os.environ), "hint")


@pytest.mark.parametrize(
    ("vllm", "lmcache", "words", "hybrid", "found"),
    [
        ("0.32.0", "0.5.6", MP, True, None),
        ("0.30.0", "0.5.2", MP, False, "Install vLLM 0.32.0 with LMCache 0.5.6."),
        ("0.30.0", "0.5.2", (), False, None),
        ("0.19.1", "0.5.6", MP, False, "Install vLLM 0.32.0 with LMCache 0.5.6."),
        ("0.19.1", "0.5.6", V1, False, "these releases are not covered"),
        ("0.28.0", "0.5.5", MP, True, "Install vLLM 0.32.0 with LMCache 0.5.6."),
        ("0.30.0", "0.5.6", V1, False, "the in-process connector takes keys and values"),
    ],
)
def test_the_installed_releases_are_judged_for_what_the_server_does_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vllm: str, lmcache: str, words: tuple[str, ...], hybrid: bool,
    found: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr("entrypoint.preflight.subject.installed_version", {"vllm": vllm, "lmcache": lmcache}.get)
    monkeypatch.setattr("entrypoint.tables.patch_rows", list)
    layers = {"layer_types": ["linear_attention", "full_attention"]} if hybrid else {}
    asked = subject(model(tmp_path, **layers), *words)
    if found is None:
        releases.CHECK.run(asked)
        return
    with pytest.raises(CheckFailedError) as failed:
        releases.CHECK.run(asked)
    assert found in str(failed.value)


def test_a_connector_that_may_be_left_out_is_not_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leave_out = {"SPLINT_LMCACHE_IN_PROCESS": "leave_out"}
    asked = [subject(model(tmp_path), *V1, **environ) for environ in ({}, leave_out)]
    assert [bool(releases.unfit(one)) for one in asked] == [True, False]
    # The patch that leaves it out begins with 0.32.
    monkeypatch.setattr("entrypoint.preflight.subject.installed_version", {"vllm": "0.31.0", "lmcache": "0.5.6"}.get)
    assert releases.unfit(subject(model(tmp_path), *V1, **leave_out))


def test_the_installed_pair_and_its_patches_fit() -> None:
    assert releases.CHECK.run(subject("m", *MP))["lmcache"] == "0.5.6"


def test_a_source_that_nobody_reviewed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SimpleNamespace(state="refused", reason="changed", patch=SimpleNamespace(id="p", library="vllm"))
    monkeypatch.setattr("entrypoint.tables.patch_rows", lambda: [row])
    with pytest.raises(CheckFailedError, match="p: changed"):
        releases.CHECK.run(subject())


def test_the_doctor_knows_that_splint_serve_sets_the_seed() -> None:
    with pytest.raises(DoesNotApplyError, match="splint serve sets PYTHONHASHSEED"):
        hash_seed.CHECK.run(Subject(Arguments(["m", *MP]), {}, thorough=True))


@pytest.mark.parametrize(
    ("environ", "right"), [({"PYTHONHASHSEED": "0"}, True), ({"PYTHONHASHSEED": "random"}, False), ({}, False)]
)
def test_a_shared_cache_needs_one_hash_seed(environ: dict[str, str], right: bool) -> None:
    sharing = subject("m", *MP, **environ)
    assert hash_seed.CHECK.applies(sharing) is None
    if right:
        hash_seed.CHECK.run(sharing)
        return
    with pytest.raises(CheckFailedError, match="PYTHONHASHSEED"):
        hash_seed.CHECK.run(sharing)


def test_without_a_connector_the_hash_seed_does_not_matter() -> None:
    assert hash_seed.CHECK.applies(subject("m")) == "no KV connector"


# --- the KV cache's dtype


def test_the_installed_release_says_which_kv_dtypes_it_knows() -> None:
    assert {"auto", "bfloat16", "fp8_e5m2"} <= packages.kv_dtypes()


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ((), {}),
        (("--kv-cache-dtype", "fp8_e5m2"), {"head_dim": 64}),
        (("--kv-cache-dtype", "bfloat16"), {"torch_dtype": "bfloat16"}),
        (("--kv-cache-dtype", "float16", "--dtype", "half"), {"torch_dtype": "bfloat16"}),
    ],
)
def test_kv_dtypes_that_are_supported_here(tmp_path: Path, words: tuple[str, ...], config: dict[str, Any]) -> None:
    kv_dtype.CHECK.run(subject(model(tmp_path, **config), *words))


@pytest.mark.parametrize(
    ("words", "config", "named"),
    [
        (("--kv-cache-dtype", "fp8_e6m1"), {}, "knows no KV dtype fp8_e6m1"),
        (("--kv-cache-dtype", "float16"), {"dtype": "bfloat16"}, "would read one's bits as the other's"),
        (("--kv-cache-dtype", "bfloat16", "--dtype", "float16"), {}, "would read one's bits as the other's"),
        (("--kv-cache-dtype", "nvfp4"), {}, "nvfp4 on the CPU, whose attention knows fp8"),
        (("--kv-cache-dtype", "fp8"), {"head_dim": 80}, "heads of 80 elements"),
        (("--kv-cache-dtype", "fp8"), {"hidden_size": 320, "num_attention_heads": 4}, "heads of 80 elements"),
        (("--kv-cache-dtype", "fp8"), {"kv_lora_rank": 512}, "multi-head latent attention"),
        (("--kv-cache-dtype", "fp8_e5m2"), {"kv_lora_rank": 512}, "whose kernels know fp8, fp8_ds_mla"),
    ],
)
def test_kv_dtypes_that_are_not(tmp_path: Path, words: tuple[str, ...], config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckFailedError) as failure:
        kv_dtype.CHECK.run(subject(model(tmp_path, **config), *words))
    assert named in failure.value.found


def test_the_setting_counts_as_the_flag() -> None:
    with pytest.raises(CheckFailedError, match="nvfp4 on the CPU"):
        kv_dtype.CHECK.run(subject("m", SPLINT_KV_DTYPE="nvfp4"))


# --- the runner and `splint serve`


def check(run: Any, severity: str = REFUSE, limit_s: float = 30.0, name: str = "one") -> Check:
    return Check(name, "It holds.", severity, limit_s, always, run)


def fails(_: Subject) -> Evidence:
    raise CheckFailedError("red", "green", "Paint it.", {"hue": 0})


@pytest.mark.parametrize(("severity", "status"), [(REFUSE, "failed"), (WARN, "warned")])
def test_a_failure_counts_as_its_check_says(severity: str, status: str) -> None:
    [result] = runner.run(subject(), [check(fails, severity)])
    assert (result.status, result.reason, result.evidence) == (status, "found red; wanted green. Paint it.", {"hue": 0})
    assert (runner.refusal([result]) is None) is (status == "warned")


def test_a_check_that_hangs_fails_at_its_limit_and_says_how_to_leave_it_out() -> None:
    start = time.monotonic()
    [result] = runner.run(subject(), [check(lambda _: time.sleep(30), limit_s=0.2)])
    assert time.monotonic() - start < 20
    assert result.status == "failed"
    assert "SPLINT_PREFLIGHT=-one" in result.reason


def test_a_check_that_ends_the_moment_its_limit_is_up_has_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was once said to be broken: there was no outcome yet, and then no thread any more."""
    running = InTime("one", lambda: ("passed", "", {}))
    running._thread.join()
    outcome = running._outcome.pop()

    def ends() -> bool:
        running._outcome.append(outcome)
        return False

    monkeypatch.setattr(running._thread, "is_alive", ends)
    assert running.outcome(0.0, "")[0] == "passed"


def test_a_check_that_breaks_before_it_knows_whether_it_applies_fails_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its error once ended the thread that runs the checks for the doctor, who then found nothing and said 0."""

    def broken(_: Subject) -> str | None:
        raise OSError("the folder can't be read")

    monkeypatch.setattr("threading.excepthook", lambda _: None)
    checks = [Check("one", "It holds.", REFUSE, 5.0, broken, lambda _: {}), check(lambda _: {}, name="two")]
    assert [(result.id, result.status) for result in runner.run(subject(), checks)] == [
        ("one", "failed"),
        ("two", "passed"),
    ]


def test_checks_run_side_by_side_and_are_told_in_order() -> None:
    all_at_once = threading.Barrier(8)

    def wait(_: Subject) -> Evidence:
        all_at_once.wait(30)
        return {}

    results = list(runner.run(subject(), [check(wait, limit_s=60.0, name=str(n)) for n in range(8)]))
    assert [(result.id, result.status) for result in results] == [(str(n), "passed") for n in range(8)]


@pytest.mark.parametrize(
    ("text", "count"),
    [("", len(CHECKS)), ("on", len(CHECKS)), ("off", 0), ("none", 0), ("port,shm", 2), ("-port,-shm", len(CHECKS) - 2)],
)
def test_the_setting_picks_checks(text: str, count: int) -> None:
    assert len(runner.chosen(CHECKS, {"SPLINT_PREFLIGHT": text})) == count


def test_an_unknown_check_in_the_setting_is_an_error() -> None:
    with pytest.raises(SettingError, match="SPLINT_PREFLIGHT names ports; wanted all, none, or some of driver"):
        runner.chosen(CHECKS, {"SPLINT_PREFLIGHT": "-ports"})


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    for name in ("SPLINT_MODE", "SPLINT_PREFLIGHT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.execve", lambda _, command, environ: calls.append((command, environ)))
    return calls


def test_splint_serve_refuses_what_the_preflight_refuses(
    became: list[Any], taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["m", "--host", "127.0.0.1", "--port", str(taken_port)]) == 78
    said = capsys.readouterr().err
    assert said.startswith("splint serve: preflight: port: found port")
    assert "To start all the same: SPLINT_PREFLIGHT=-port, or off." in said
    assert became == []


@pytest.mark.parametrize(("name", "value"), [("SPLINT_PREFLIGHT", "-port"), ("SPLINT_MODE", "report")])
def test_splint_serve_starts_all_the_same_where_it_is_told_to(
    became: list[Any], taken_port: int, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    serve.main(["m", "--host", "127.0.0.1", "--port", str(taken_port)])
    assert len(became) == 1


def test_splint_serve_says_how_the_preflight_went(became: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    serve.main(["m", "--headless"])
    assert len(became) == 1
    assert " passed, " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_in_its_preflight_ends_well(tmp_path: Path, number: int) -> None:
    """A stand-in for torch says that the probe runs, and hangs."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    os.mkfifo(tmp_path / "pid")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SPLINT_")}
    command = [sys.executable, "-m", "entrypoint.cli", "serve", "m", "-dp", "2"]
    with subprocess.Popen(
        command, env={**kept, "PYTHONPATH": path, "SPLINT_PREFLIGHT": "allreduce"}, stderr=subprocess.PIPE
    ) as server:
        probe = int((tmp_path / "pid").read_text())
        watched = os.pidfd_open(probe)
        server.send_signal(number)
        assert server.wait(60) == 0
        assert select.select([watched], [], [], 60)[0], "the probe outlives its server"
        os.close(watched)


def test_the_preflight_imports_neither_torch_nor_vllm(became: list[Any]) -> None:
    before = {name for name in ("torch", "vllm", "lmcache") if name in sys.modules}
    serve.main(["m", "--headless"])
    assert {name for name in ("torch", "vllm", "lmcache") if name in sys.modules} == before
    assert len(became) == 1
