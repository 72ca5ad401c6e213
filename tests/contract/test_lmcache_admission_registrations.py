"""What engines register in an LMCache server: one layout a name, and no lossy serde for one-byte KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.lmcache_tiers import Memory, apply, key, layout, load, make_tier, store

from patches.framework.errors import EnvironmentRefusedError, MismatchError
from patches.lmcache_admission import PATCH, serdes

pytest.importorskip("lmcache")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning",  # LMCache's logging
    "ignore::FutureWarning",  # Google's libraries, on Python's and their own releases
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    from lmcache.v1.multiprocess.engine_context import LayoutDescRegistry

    monkeypatch.setattr(serdes, "_lossy", set())
    monkeypatch.setattr(serdes, "_one_byte", set())
    apply(PATCH, monkeypatch)
    return LayoutDescRegistry()


def test_another_layout_under_the_same_name_is_refused_even_after_the_first_has_gone(registry: Any) -> None:
    registry.register("model", 1, layout(["bfloat16"]))
    registry.register("model", 1, layout(["bfloat16"]))
    with pytest.raises(MismatchError, match=r"float16\[2, 2, 16, 64\].*bfloat16"):
        registry.register("model", 1, layout(["float16"]))
    registry.unregister("model", 1)
    registry.unregister("model", 1)
    with pytest.raises(MismatchError, match="start an LMCache server for each"):
        registry.register("model", 1, layout(["uint8"]))
    registry.register("model", 1, layout(["bfloat16"]))
    registry.register("model", 2, layout(["uint8"]))
    registry.register("other", 1, layout(["uint8"]))


def test_stock_takes_the_last_layout(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(PATCH, monkeypatch, leave_out=["LayoutDescRegistry.register"])
    registry.register("model", 1, layout(["bfloat16"]))
    registry.register("model", 1, layout(["float16"]))


def test_a_lossy_serde_does_to_wide_kv_what_it_does_in_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one-byte KV is refused: through a sealed tier bfloat16 comes back as near as e4m3 can hold it."""
    import torch
    from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer

    apply(PATCH, monkeypatch)
    memory = Memory()
    wide = layout(["bfloat16"])
    narrow = layout(["uint8"], [wide.shapes[0].numel()])
    (written,), (read,) = memory.random(wide, 1), memory.allocate(wide, 1)
    (sent,), (came,) = memory.allocate(narrow, 1), memory.allocate(narrow, 1)
    written.tensor.copy_(torch.linspace(-400, 400, written.tensor.numel()).view_as(written.tensor))
    with make_tier("fs", tmp_path, serde="fp8") as tier:
        assert Fp8QuantizationSerializer().serialize(written, sent, key(1)) == narrow.shapes[0].numel()
        assert store(tier, [key(1)], [sent])
        assert load(tier, [key(1)], [came]) == [0]
        Fp8QuantizationDeserializer().deserialize(came, read, key(1))
    assert torch.equal(read.tensor, written.tensor.to(torch.float8_e4m3fn).to(torch.bfloat16))
    memory.close()


def test_groups_of_another_layout_are_refused(registry: Any) -> None:
    groups = {0: layout(["bfloat16"]), 1: layout(["bfloat16"], [2, 8])}
    registry.register("model", 1, groups[0], group_layout_descs=groups)
    with pytest.raises(MismatchError):
        registry.register("model", 1, groups[0], group_layout_descs={**groups, 1: layout(["bfloat16"], [2, 16])})
    with pytest.raises(MismatchError):
        registry.register("model", 1, groups[0], group_layout_descs={0: groups[0]})


def test_lossy_serde_and_one_byte_kv_are_refused_in_either_order(registry: Any, tmp_path: Any) -> None:
    registry.register("wide", 1, layout(["bfloat16"]))
    with make_tier("fs", tmp_path, serde="fp8"):
        with pytest.raises(EnvironmentRefusedError, match="lossy serde fp8 for the one-byte KV cache of narrow"):
            registry.register("narrow", 1, layout(["uint8"]))
        registry.register("wide", 2, layout(["bfloat16"]))
    serdes._lossy.clear()
    registry.register("narrow", 1, layout(["uint8"]))
    with pytest.raises(EnvironmentRefusedError), make_tier("fs", tmp_path, serde="turboquant"):
        pass
    with make_tier("fs", tmp_path, serde="aesgcm"):
        pass
