"""The in-process connector: refused or left out by vLLM's own configuration; LMCache that can't work ends the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Seam
from patches.lmcache_in_process.fitness import Cache, unfit
from patches.lmcache_whole import wrappers

pytest.importorskip("vllm")
pytest.importorskip("lmcache")
TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-m", "support.in_process_configs", str(tmp_path_factory.mktemp("models"))],
        env={**os.environ, "SPLINT_PATCHES": "lmcache_in_process", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path,
             "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture
def refusing(answers: Any) -> Any:
    return answers["refuse"]


@pytest.fixture
def leaving_out(answers: Any) -> Any:
    return answers["leave_out"]


@pytest.mark.parametrize("case", ["dense", "latent", "sparse", "hybrid", "inside another"])
def test_on_the_cpu_the_connector_is_refused_with_what_to_use(refusing: Any, case: str) -> None:
    assert "no in-process connector for the CPU" in refusing[case]["refused"]
    assert "Use LMCacheMPConnector with an `lmcache server`" in refusing[case]["refused"]


@pytest.mark.parametrize(("case", "connector"), [("multi-process", "LMCacheMPConnector"), ("none", None)])
def test_other_configurations_are_left_as_they_are(refusing: Any, case: str, connector: str | None) -> None:
    assert refusing[case]["connector"] == connector


@pytest.mark.parametrize("case", ["dense", "latent", "sparse", "hybrid"])
def test_an_operator_may_have_it_left_out(leaving_out: Any, case: str) -> None:
    """vllm#42911: with the connector vLLM turns its hybrid KV cache manager off, and a hybrid model can't start."""
    assert leaving_out[case]["connector"] is None
    assert leaving_out[case]["hybrid manager"]


def test_inside_another_connector_it_is_never_left_out(leaving_out: Any) -> None:
    assert "LMCacheConnectorV1: there is no" in leaving_out["inside another"]["refused"]


@pytest.mark.parametrize(
    ("case", "told"),
    [("dense", set()), ("latent", {"latent"}), ("sparse", {"latent", "sparse"}), ("hybrid", {"hybrid"})],
)
def test_the_rules_are_told_of_vllms_own_reading_of_the_model(leaving_out: Any, case: str, told: set[str]) -> None:
    found = leaving_out[case]["told"]
    assert {name for name in ("latent", "sparse", "hybrid") if found[name]} == told
    assert (found["on_cpu"], found["format"]) == (True, "auto")


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (Cache(), "packed KV layout"),
        (Cache(on_cpu=True, latent=True), "for the CPU"),
        (Cache(hybrid=True), "hybrid models"),
        (Cache(latent=True, sparse=True), "sparse latent attention"),
        (Cache(latent=True, format="fp8_ds_mla"), "fp8_ds_mla"),
        (Cache(latent=True), "nothing proves it exact"),
        (Cache(latent=True, format="fp8_e4m3"), "nothing proves it exact"),
    ],
)
def test_why_the_connector_is_not_exact(cache: Cache, why: str) -> None:
    assert why in (unfit(cache) or "")


def stock(owner: Any, name: str) -> Any:
    found = vars(owner)[name]
    return getattr(found, "__wrapped__", found)


def test_an_in_process_lmcache_that_can_not_start_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine as it is: there is no connector for the CPU."""
    from lmcache.v1.manager import LMCacheManager

    def no_parts() -> None:
        raise RuntimeError("No supported cpu connector found.")

    parts = SimpleNamespace(get_or_create_metadata=no_parts)
    monkeypatch.setattr(LMCacheManager, "__init__", stock(LMCacheManager, "__init__"))
    assert LMCacheManager(None, parts)._init_failed  # stock: degraded, and a log line
    monkeypatch.setattr(LMCacheManager, "__init__", wrappers.init(Seam("init", LMCacheManager.__init__, lambda: None)))
    with pytest.raises(EnvironmentRefusedError, match="No supported cpu connector found") as refused:
        LMCacheManager(None, parts)
    assert "LMCacheMPConnector" in refused.value.remedy


def test_one_that_fails_later_ends_the_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmcache.v1.manager import LMCacheManager

    name = "_handle_post_init_failure"
    guard = wrappers.handle_post_init_failure(Seam(name, stock(LMCacheManager, name), lambda: None))
    monkeypatch.setattr(LMCacheManager, name, guard)
    manager = object.__new__(LMCacheManager)
    manager._lmcache_engine = None
    with pytest.raises(EnvironmentRefusedError, match="would cache nothing"):
        manager._handle_post_init_failure(ValueError("no room"))


def test_operations_for_a_gpu_that_do_not_load_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are built for CUDA, so on this machine the import fails as it does with another CUDA."""
    from lmcache.v1.platform.devices.cuda.device_ops import CudaDeviceOps

    monkeypatch.setattr(CudaDeviceOps, "ensure_native", stock(CudaDeviceOps, "ensure_native"))
    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", None)
    CudaDeviceOps().ensure_native()  # stock: a warning, and slow operations
    guard = wrappers.ensure_native(Seam("ensure_native", CudaDeviceOps.ensure_native, lambda: None))
    monkeypatch.setattr(CudaDeviceOps, "ensure_native", guard)
    with pytest.raises(EnvironmentRefusedError, match="operations for this GPU do not load"):
        CudaDeviceOps().ensure_native()
