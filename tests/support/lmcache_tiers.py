"""Objects, keys and tiers of a real LMCache server, without the server: patched where the code under test asks it."""

from __future__ import annotations

import random
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from patches.framework.records import Patch, Seam

__all__ = [
    "DTYPES", "SEAL", "Memory", "apply", "damaged", "key", "layout", "load", "look_up", "make_tier", "same", "store",
]  # fmt: skip

SEAL = 80
DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "bool", "bfloat16", "float16", "float32", "float64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
MODEL = "Org/model-kv1-0123456789ab"
_WAIT_MS = 60_000


def apply(patch: Patch, monkeypatch: Any, *, leave_out: Sequence[str] = ()) -> None:
    """Put a patch's wrappers onto the real functions for one test, whether or not the process has them already."""
    for target in patch.targets:
        module = import_module(target.module)
        owner: Any = module
        *path, attribute = target.qualname.split(".")
        for name in path:
            owner = getattr(owner, name)
        stored = vars(owner)[attribute]
        original = stored.__func__ if isinstance(stored, (staticmethod, classmethod)) else stored
        original = getattr(original, "__wrapped__", original)
        if target.qualname in leave_out:
            put: Any = original
        else:
            where, _, factory = target.wrapper.partition(":")
            put = getattr(import_module(where), factory)(Seam(target.name, original, lambda: None))
        if isinstance(stored, (staticmethod, classmethod)):
            put = type(stored)(put)
        monkeypatch.setattr(owner, attribute, put)
        _rebind(monkeypatch, original, stored, put, attribute)


def _rebind(monkeypatch: Any, original: Any, stored: Any, put: Any, attribute: str) -> None:
    """Names that other modules of LMCache have bound at their import."""
    for name, module in sys.modules.copy().items():
        if name.startswith("lmcache.") and vars(module).get(attribute) in (original, stored):
            monkeypatch.setattr(module, attribute, put)


class Memory:
    """A first level of its own."""

    def __init__(self, size: int = 64 << 20, **settings: Any) -> None:
        from lmcache.v1.distributed.config import L1MemoryManagerConfig
        from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager

        self.manager = L1MemoryManager(L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, **settings))
        self._objects: list[Any] = []

    def allocate(self, desc: Any, count: int) -> list[Any]:
        error, objects = self.manager.allocate(desc, count)
        if error.name != "SUCCESS":
            raise MemoryError(error.name)
        self._objects += objects
        return list(objects)

    def random(self, desc: Any, count: int, seed: int = 0) -> list[Any]:
        """Objects of random bytes: all 256 values, so every NaN pattern there is."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        objects = self.allocate(desc, count)
        for found in objects:
            found.raw_data[: found.get_size()].random_(0, 256, generator=generator)
        return objects

    def close(self) -> None:
        for found in self._objects:
            found.ref_count_down()
        self.manager.close()


def layout(dtypes: Sequence[str] = ("uint8",), shape: Sequence[int] = (2, 2, 16, 64)) -> Any:
    """LMCache's description of an object: one group a dtype."""
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc([torch.Size(shape) for _ in dtypes], [getattr(torch, name) for name in dtypes])


def key(number: int, *, model: str = MODEL, salt: str = "") -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(number.to_bytes(32, "big"), model, 0x01000000, 0, salt)


@contextmanager
def make_tier(
    kind: str, folder: Path | None = None, serde: Mapping[str, Any] | str = "", **settings: Any
) -> Iterator[Any]:
    """A tier as the LMCache server makes it from its command line, without the serde itself around it."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    import_module(f"lmcache.v1.distributed.l2_adapters.{kind}_l2_adapter")  # LMCache would try them all, in order
    config_class = get_l2_adapter_config_class(kind)
    spec = dict(settings, type=kind, **({"base_path": str(folder)} if folder else {}))
    config = config_class.from_dict(spec)
    if isinstance(serde, str):
        serde = {"type": serde} if serde else {}
    config.serde_config = config._parse_serde_config({"serde": dict(serde)}) if serde else None
    tier = create_l2_adapter(config)
    try:
        yield tier
    finally:
        tier.close()


def store(tier: Any, keys: list[Any], objects: list[Any]) -> bool:
    number = tier.submit_store_task(keys, objects)
    done = _answer(tier.get_store_event_fd(), lambda: tier.pop_completed_store_tasks().get(number))
    return bool(done.is_successful())


def look_up(tier: Any, keys: list[Any]) -> list[int]:
    """Places of the keys that are there."""
    number = tier.submit_lookup_and_lock_task(keys, {})
    found = _answer(tier.get_lookup_and_lock_event_fd(), lambda: tier.query_lookup_and_lock_result(number))
    return list(found.get_indices_list())


def load(tier: Any, keys: list[Any], objects: list[Any]) -> list[int]:
    """Places of the keys that were loaded."""
    number = tier.submit_load_task(keys, objects)
    loaded = _answer(tier.get_load_event_fd(), lambda: tier.query_load_result(number))
    if hasattr(tier, "_worker"):
        tier._worker.submit(lambda: None).result()  # what was refused is deleted by now
    return list(loaded.get_indices_list())


def _answer(descriptor: int, ask: Callable[[], Any]) -> Any:
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while (answer := ask()) is None:
        if not poller.poll(_WAIT_MS):
            raise TimeoutError("no answer of the tier")
        consume_fd(descriptor)
    return answer


def same(written: list[Any], read: list[Any]) -> bool:
    return all(bytes(one.byte_array) == bytes(other.byte_array) for one, other in zip(written, read, strict=True))


def flipped(whole: bytes, place: int, chance: random.Random) -> bytes:
    return whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place:][1:]


def damaged(whole: bytes, other: bytes, chance: random.Random) -> bytes:
    """A file that is not the one that was written, in one of the ways in which files go bad."""
    place, end = chance.randrange(len(whole)), len(whole) - SEAL
    block = place // 512 * 512
    return chance.choice([
        whole[:place],
        whole + chance.randbytes(chance.randrange(1, 200)),
        b"",
        other,
        flipped(whole, place, chance),
        flipped(whole, end + chance.randrange(SEAL), chance),
        other[:end] + whole[end:],
        whole[:block] + bytes(len(whole) - block),
    ])  # fmt: skip
