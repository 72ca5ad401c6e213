"""An engine takes an LMCache server over ZMQ only: over gRPC nothing tells that a server is gone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from patches.framework import process
from patches.framework.errors import EnvironmentRefusedError

pytest.importorskip("lmcache")
zmq = pytest.importorskip("zmq")

pytestmark = pytest.mark.filterwarnings("ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning")

URLS = ("grpc://127.0.0.1:1", " GRPC://127.0.0.1:1", "grpc+unix:///absent")


@pytest.fixture(autouse=True)
def adapters() -> Any:
    """LMCache's classes. The hooks must have patched them in this process."""
    process.start()
    return importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")


def strategy(adapters: Any) -> Any:
    return adapters.ParallelStrategy(
        mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
    )


@pytest.mark.parametrize("url", URLS)
def test_both_sides_of_an_engine_refuse_a_server_over_grpc_before_they_connect(url: str, adapters: Any) -> None:
    context = zmq.Context.instance()
    with pytest.raises(EnvironmentRefusedError, match=r"over gRPC; wanted ZMQ") as scheduler:
        adapters.LMCacheMPSchedulerAdapter(
            ["tcp://127.0.0.1:1", url], context, "model", 128, strategy(adapters), extra_config={}
        )
    with pytest.raises(EnvironmentRefusedError, match=r"over gRPC; wanted ZMQ"):
        adapters.LMCacheMPWorkerAdapter(url, context, "model", 128, strategy(adapters), extra_config={})
    assert "tcp://" in scheduler.value.remedy
