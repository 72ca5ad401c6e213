"""Bad input ends in seconds, before anything heavy starts, with what was found, what was wanted and what to do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.servers import Server, connector_config, free_port, lmcache_server, running

VLLM_SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")


def ended(server: Server, within_s: float) -> tuple[int, str]:
    """The server's exit code and log; it must end by itself in time and leave nothing behind."""
    start = time.monotonic()
    with running(server):
        code = server.wait_end(within_s)
        print(f"ended with {code} after {time.monotonic() - start:.1f} s: {server.tail(4)}")
        assert server.members() == []
        return code, server.text()


@pytest.mark.parametrize("form", [VLLM_SERVE, ("-m", "entrypoint.cli", "serve")], ids=["vllm serve", "splint serve"])
def test_an_unknown_setting_names_the_nearest(build: Callable[..., Server], form: tuple[str, ...]) -> None:
    code, text = ended(build(form=form, env={"SPLINT_SMOK": "off"}), within_s=20)
    assert code == 78
    assert "Did you mean SPLINT_SMOKE?" in text
    assert "Traceback" not in text


def test_a_model_path_that_does_not_exist(build: Callable[..., Server]) -> None:
    code, text = ended(build(model_path="/no/such/model"), within_s=20)
    assert code == 78
    assert "/no/such/model" in text
    assert "Traceback" not in text


def test_a_port_in_use(build: Callable[..., Server]) -> None:
    server = build()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server.port))
        taken.listen()
        code, text = ended(server, within_s=20)
    assert code == 78
    assert str(server.port) in text
    assert "Traceback" not in text


def test_no_lmcache_server(build: Callable[..., Server]) -> None:
    port = free_port()
    code, text = ended(build("--kv-transfer-config", connector_config(port)), within_s=120)
    assert code == 78
    assert f"no LMCache server answered at tcp://127.0.0.1:{port} within 10 s" in text
    assert "lmcache server" in text.rpartition("Start the server with")[2]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--chunk-size", "128"), "answers, but not to the registration of this engine's KV cache"),
        (("--chunk-size", "192", "--supported-transfer-mode", "auto"), "has chunk size 192"),
    ],
    ids=["wrong transfer mode", "chunk size no multiple"],
)
def test_an_lmcache_server_that_does_not_suit(
    build: Callable[..., Server], tmp_path: Path, flags: tuple[str, ...], found: str
) -> None:
    """Stock hangs for 300 s in the first case."""
    with lmcache_server(tmp_path / "lmcache.log", flags=flags) as cache:
        code, text = ended(build("--kv-transfer-config", connector_config(cache.port)), within_s=120)
    assert code == 78
    assert found in text
    assert "--supported-transfer-mode auto" in text.rpartition("splint:")[2] + text
