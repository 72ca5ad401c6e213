"""Servers that several tests share: starting one takes half a minute or more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.ends import abandoned_segments
from support.servers import (
    ENGINE_FLAGS,
    Server,
    connector_config,
    engine_environment,
    free_port,
    lmcache_server,
    running,
)

from entrypoint.local.model import make_tiny_model

Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tiny Qwen3-MoE."""
    return str(make_tiny_model(folder=tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="session")
def build(model: str, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Make a server that is not started: ``build(*flags, form=..., env=...)``."""

    def build(*flags: str, form: tuple[str, ...] = ("-m", "entrypoint.cli", "serve"), env: dict[str, str] | None = None,
              model_path: str = model) -> Server:  # fmt: skip
        port = free_port()
        folder = tmp_path_factory.mktemp("server")
        command = (*form, *_model(form, model_path), *ENGINE_FLAGS, "--port", str(port), *flags)
        return Server(command, port, folder / "server.log", engine_environment(**(env or {})))

    return build


def _model(form: tuple[str, ...], path: str) -> tuple[str, ...]:
    return ("--model", path) if form[-1].endswith("api_server") else (path,)


@pytest.fixture
def serve(build: Serve) -> Iterator[Serve]:
    """Start a server, ready to serve, that ends with the test: ``serve(*flags, form=..., env=...)``."""
    with ExitStack() as stack:

        def serve(*flags: str, **options: object) -> Server:
            server = stack.enter_context(running(build(*flags, **options)))
            server.wait_ready()
            return server

        yield serve


@pytest.fixture
def shared_memory_left_as_found() -> Iterator[None]:
    """No shared-memory segment outlives its server; other servers of the machine may be making and dropping theirs."""
    before = abandoned_segments()
    yield
    deadline = time.monotonic() + 30
    while (left := abandoned_segments() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == set()


@pytest.fixture(scope="session")
def stack(build: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The main job: two data-parallel engines with expert parallelism, FP8 KV cache and LMCache, open for traffic."""
    folder: Path = tmp_path_factory.mktemp("lmcache")
    shared = {"SPLINT_RUN_DIR": str(folder / "run")}
    with lmcache_server(folder / "lmcache.log", environ=engine_environment(**shared)) as cache:
        server = build(
            "--data-parallel-size", "2", "--enable-expert-parallel", "--api-server-count", "1",
            "--kv-cache-dtype", "fp8_e5m2", "--kv-transfer-config", connector_config(cache.port),
            env={"SPLINT_PREFLIGHT": "on", **shared},
        )  # fmt: skip
        with running(server):
            server.wait_ready()
            yield server
