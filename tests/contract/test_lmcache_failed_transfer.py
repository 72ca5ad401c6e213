"""An LMCache server whose handler fails, on LMCache's own module in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework.records import Seam
from patches.lmcache_failed_transfer import PATCH
from patches.lmcache_failed_transfer.wrappers import answered

pytest.importorskip("lmcache")
pytestmark = pytest.mark.filterwarnings("ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning")
ENGINE = 4711


class Stream:
    def __init__(self) -> None:
        self.drained = 0

    def synchronize(self) -> None:
        self.drained += 1


@pytest.fixture(params=["store", "retrieve"])
def handler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, handler: str) -> Any:
    """LMCache's module with one engine whose registration lacks what every transfer needs."""
    from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule

    found = object.__new__(LMCacheDrivenTransferModule)
    stream = Stream()
    entry = SimpleNamespace(cache_context=SimpleNamespace(stream=stream), model_name="model", event_backend=None)
    monkeypatch.setattr(LMCacheDrivenTransferModule, "get_and_touch_context_entry", lambda *_: entry)
    original = vars(LMCacheDrivenTransferModule)[handler]
    monkeypatch.setattr(LMCacheDrivenTransferModule, handler, getattr(original, "__wrapped__", original))
    found.stream = stream
    return found


def test_without_the_guard_nobody_is_answered(module: Any, handler: str) -> None:
    with pytest.raises(RuntimeError, match="no event backend"):
        getattr(module, handler)(None, ENGINE, [[1]], b"")


def test_a_failed_transfer_is_answered_once_nothing_runs_any_more(
    module: Any, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard(module, handler, monkeypatch)
    assert getattr(module, handler)(None, ENGINE, [[1]], b"") == (b"", False)
    assert module.stream.drained == 1


def test_where_that_can_not_be_told_nobody_is_answered(
    module: Any, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("the device is gone")

    guard(module, handler, monkeypatch)
    monkeypatch.setattr(module.stream, "synchronize", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        getattr(module, handler)(None, ENGINE, [[1]], b"")


def test_it_stays_the_handler_that_lmcache_registers(
    module: Any, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = vars(getattr(type(module), handler))
    guard(module, handler, monkeypatch)
    after = vars(getattr(type(module), handler))
    assert {name: after[name] for name in before} == before


def guard(module: Any, handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (target,) = (target for target in PATCH.targets if target.qualname.endswith(f".{handler}"))
    seam = Seam(target.name, getattr(type(module), handler), lambda: None)
    monkeypatch.setattr(type(module), handler, answered(seam))
