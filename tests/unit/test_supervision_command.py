from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patches import supervision
from patches.supervision.command import drain_seconds, is_headless, leaves_out

PYTHON = "/usr/bin/python3"


@pytest.mark.parametrize(
    "arguments",
    [
        "/x/bin/vllm serve",
        "/x/bin/vllm serve model --port 8000",
        "/x/bin/vllm serve --headless",
        "vllm serve",
        "-m vllm.entrypoints.openai.api_server --model m",
        "-mvllm.entrypoints.openai.api_server --model m",
        "-m vllm.entrypoints.cli.main serve m",
        "-m vllm serve m",
        "-u -m vllm.entrypoints.openai.api_server",
        "-um vllm.entrypoints.openai.api_server",
        "-X dev -W error -B -I -m vllm.entrypoints.cli.main serve m",
        "-Xdev -Werror /x/bin/vllm serve m",
        "-uX dev /x/bin/vllm serve m",
        "--check-hash-based-pycs never /x/bin/vllm serve m",
        "-- /x/bin/vllm serve m",
        "/x/site-packages/vllm/entrypoints/openai/api_server.py --model m",
        "/x/site-packages/vllm/entrypoints/cli/main.py serve m",
    ],
)
def test_serving_command_is_recognised(arguments: str) -> None:
    assert supervision.is_serving_command([PYTHON, *arguments.split()])


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "/x/bin/vllm",
        "/x/bin/vllm --version",
        "/x/bin/vllm bench serve --model m",
        "/x/bin/vllm chat serve",
        "/x/bin/vllm complete",
        "/x/bin/splint serve vllm",
        "-m vllm.entrypoints.cli.main bench serve",
        "-m vllm.entrypoints.cli.main",
        "-m pip install vllm serve",
        "/x/bin/pip install vllm serve",
        "-m pytest vllm serve",
        "-m",
        "-",
        "- vllm serve",
        "-c import(vllm) /x/bin/vllm serve",
        "-Ic import(vllm) -m vllm serve",
        "-c from-multiprocessing.spawn-import-spawn_main;spawn_main(vllm) --multiprocessing-fork",
        "-X /x/bin/vllm serve",
        "-W vllm serve",
        "/x/vllm/serve.py vllm serve",
    ],
)
def test_other_command_is_left_alone(arguments: str) -> None:
    assert not supervision.is_serving_command([PYTHON, *arguments.split()])


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("/x/bin/lmcache server --port 1", "lmcache"),
        ("-m lmcache.cli.main server", "lmcache"),
        ("-m lmcache.v1.multiprocess.http_server --port 1", "lmcache.v1.multiprocess.http_server"),
        ("-m lmcache.v1.multiprocess.server", "lmcache.v1.multiprocess.server"),
        ("/x/bin/lmcache bench", ""),
        ("/x/bin/lmcache_server localhost 1", ""),
        ("-m lmcache.v1.server localhost 1", ""),
    ],
)
def test_an_lmcache_server_is_known_in_each_form_of_its_start(arguments: str, program: str) -> None:
    assert supervision.cache_server([PYTHON, *arguments.split()]) == program


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ("", 0.0),
        ("--shutdown-timeout 5", 5.0),
        ("--shutdown-timeout=30", 30.0),
        ("--shutdown_timeout 7 --port 1", 7.0),
        ("--shutdown-timeout", 0.0),
        ("--shutdown-timeout soon", 0.0),
    ],
)
def test_drain_is_read_from_the_command_line(flags: str, seconds: float) -> None:
    assert drain_seconds([PYTHON, "vllm", "serve", *flags.split()]) == seconds


def test_headless_server_is_known_by_its_flag() -> None:
    assert is_headless([PYTHON, "vllm", "serve", "m", "--headless"])
    assert not is_headless([PYTHON, "vllm", "serve", "m"])


@pytest.mark.parametrize("form", [["vllm", "serve"], ["-m", "vllm.entrypoints.openai.api_server"]])
def test_a_config_file_tells_both_and_the_command_line_wins(form: list[str], tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: m\nshutdown-timeout: 12\nheadless: true\n")
    argv = [PYTHON, *form, "--config", str(file)]
    assert (drain_seconds(argv), is_headless(argv)) == (12.0, True)
    assert drain_seconds([*argv, "--shutdown-timeout", "3"]) == 3.0
    file.write_text("model: m\nheadless: false\n")
    assert (drain_seconds(argv), is_headless(argv)) == (0.0, False)


def test_a_config_file_that_nobody_can_read_tells_nothing(tmp_path: Path) -> None:
    argv = [PYTHON, "vllm", "serve", "--config", str(tmp_path / "nowhere.yaml")]
    assert (drain_seconds(argv), is_headless(argv)) == (0.0, False)


@pytest.mark.parametrize(
    ("selection", "ungated"),
    [
        ("", False),
        ("all", False),
        ("none", True),
        ("kv_budget", True),
        ("kv_budget, serving_gate", False),
        ("-kv_budget", False),
        ("-kv_budget,-serving_gate", True),
    ],
)
def test_selection_without_the_gate_is_known(selection: str, ungated: bool) -> None:
    assert leaves_out(selection, "serving_gate") is ungated


def test_process_that_names_no_vllm_imports_nothing_for_the_check() -> None:
    program = (
        "import sys, patches; before = set(sys.modules); from patches import supervision;"
        "supervision.is_serving_command(['python', '-m', 'pip', 'install', 'x']);"
        "print(sorted(set(sys.modules) - before))"
    )
    found = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert found.stdout.strip() == "['patches.supervision']"
