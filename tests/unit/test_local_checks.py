"""Bad input to `make serve`: one clear line before anything starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.local import checks
from entrypoint.local.plan import Plan
from entrypoint.local.ports import free_ports
from patches.framework.errors import SplintError


def plan(model: str | None, port: int | None = None) -> Plan:
    return Plan(model=model, architecture="qwen3_moe", port=port or free_ports(1)[0], arguments=())


def test_a_port_in_use_is_refused_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SplintError, match=f"port {port} is in use"):
            checks.check(plan(None, port))


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(SplintError, match="from 1 to 65535"):
        checks._check_port(port)


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "~/no-such-model", "a/b/c", "a model"])
def test_a_model_path_that_does_not_exist_is_refused(model: str) -> None:
    with pytest.raises(SplintError, match="there is no model at"):
        checks.check(plan(model))


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SplintError, match=r"holds no config\.json"):
        checks.check(plan(str(tmp_path)))


def test_a_folder_with_a_configuration_and_a_hub_name_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    checks.check(plan(str(tmp_path)))
    checks.check(plan("owner/model"))


def test_too_little_memory_is_refused_with_the_figure() -> None:
    with pytest.raises(SplintError, match=r"1\.5 GiB of memory are free; wanted 9 GiB"):
        checks._check_memory(3 * checks.GIB // 2)


@pytest.mark.parametrize("arguments", [["--model", "/no/such/model"], ["--port", "70000"], ["--", "--port", "x"]])
def test_the_command_ends_with_2_and_one_line(arguments: list[str]) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "entrypoint.local", *arguments], check=False, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("serve: ")
    assert len(finished.stderr.splitlines()) == 1
