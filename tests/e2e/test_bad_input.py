"""Bad input ends in seconds, before anything heavy starts, with what was found, what was wanted and what to do.

LMCache servers that do not suit are in ``test_lmcache_server_death.py``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
from support.servers import Server, running

VLLM_SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")


def ended(server: Server, within_s: float) -> tuple[int, str]:
    """The server's exit code and log; it must end by itself in time and leave nothing behind."""
    start = time.monotonic()
    with running(server):
        code = server.wait_end(within_s)
        print(f"ended with {code} after {time.monotonic() - start:.1f} s: {server.tail(4)}")
        assert server.left() == []
        return code, server.text()


@pytest.mark.parametrize("form", [VLLM_SERVE, ("-m", "entrypoint.cli", "serve")], ids=["vllm serve", "splint serve"])
def test_an_unknown_setting_names_the_nearest(build: Callable[..., Server], form: tuple[str, ...]) -> None:
    code, text = ended(build(form=form, env={"SPLINT_SMOK": "off"}), within_s=20)
    assert code == 78
    assert "Did you mean SPLINT_SMOKE?" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("form", [VLLM_SERVE, ("-m", "entrypoint.cli", "serve")], ids=["vllm serve", "splint serve"])
def test_what_the_gate_can_not_guard_is_refused(build: Callable[..., Server], form: tuple[str, ...]) -> None:
    code, text = ended(build("--grpc", form=form), within_s=20)
    assert code == 78
    assert "--grpc answers requests on a port that the gate does not guard" in text
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
