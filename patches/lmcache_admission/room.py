"""Room for the seal: every object in L1 gets some bytes behind its own, so that both travel as one, uncopied."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

from patches.lmcache_admission.seal import NO_SERDE, SEAL_BYTES, Meaning, array, key_digest, layout_digest, make

__all__ = ["Sealed", "allocate_with_room", "fingerprint_in", "give_room", "has_room", "roomy"]

_FINGERPRINT = re.compile(r"kv\d+-[0-9a-f]{12}")


def allocate_with_room(allocate: Any, manager: Any, layout: Any, count: int) -> Any:
    """Allocate objects of ``layout`` whose memory goes on for a seal. What they say of themselves is as without it.

    Args:
        allocate: ``L1MemoryManager.allocate``.
        manager: The memory manager.
        layout: LMCache's ``MemoryLayoutDesc``.
        count: How many.

    Returns:
        What LMCache's own returns: an error code and the objects.
    """
    error, objects = allocate(manager, type(layout)(*roomy(layout.shapes, layout.dtypes)), count)
    for found in objects:
        give_room(found, layout.shapes, layout.dtypes)
    return error, objects


def roomy(shapes: Sequence[Any], dtypes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Shapes and dtypes of an object with room: one more group, for the seal."""
    import torch

    return [*shapes, torch.Size([SEAL_BYTES])], [*dtypes, torch.uint8]


def give_room(found: Any, shapes: Sequence[Any], dtypes: Sequence[Any]) -> None:
    """Have an object that was allocated with room say of itself what it would say without.

    Its memory goes on behind its tensor: LMCache sends that tensor whole to ranks that have made one of its own size.
    """
    found.meta.shapes, found.meta.dtypes = list(shapes), list(dtypes)
    del found.group_prefix_sum[-1]
    if found.raw_data.numel() == found.get_size() + SEAL_BYTES:
        found.raw_data = found.raw_data[: found.get_size()]


def has_room(found: Any) -> bool:
    """Whether a seal fits behind the object's bytes, in memory of its own."""
    return bool(found.get_physical_size() - found.get_size() >= SEAL_BYTES)


class Sealed:
    """An object as a tier sees it: its bytes and the seal behind them, or the whole aligned slot. A view, no copy.

    Args:
        key: LMCache's key of the object; it may be set later, but before a seal is made.
        inner: LMCache's ``TensorMemoryObj``, with room.
        aligned: Whether the tier needs whole slots (``O_DIRECT``).
        serde: Of the serde between KV and these bytes, what :func:`~patches.lmcache_admission.seal.serde_digest` gave.
    """

    def __init__(self, key: Any, inner: Any, *, aligned: bool = False, serde: bytes = NO_SERDE) -> None:
        self.key = key
        self.inner = inner
        self._serde = serde
        self._length: int = inner.get_physical_size() if aligned else inner.get_size() + SEAL_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_size(self) -> int:
        """Bytes that the tier stores."""
        return self._length

    @property
    def byte_array(self) -> memoryview:
        """What the tier reads and writes."""
        return memoryview(array(self._length).from_address(self.inner.data_ptr))

    def seal(self) -> None:
        """Write the seal of the bytes as they are, and zeros to the end of an aligned slot."""
        end = self.inner.data_ptr + self.inner.get_size()
        ctypes.memmove(end, self.expected(), SEAL_BYTES)
        ctypes.memset(end + SEAL_BYTES, 0, self._length - self.inner.get_size() - SEAL_BYTES)

    def expected(self) -> bytes:
        """The seal that belongs behind the bytes as they are now."""
        inner, key = self.inner, self.key
        groups = tuple(
            (str(dtype).removeprefix("torch."), tuple(shape))
            for shape, dtype in zip(inner.get_shapes(), inner.get_dtypes(), strict=True)
        )
        meaning = Meaning(
            key=key_digest(_parts(key)),
            layout=layout_digest(groups, inner.get_memory_format().name),
            groups=len(groups),
            fingerprint=fingerprint_in(key.model_name),
            serde=self._serde,
        )
        return make(meaning, inner.data_ptr, inner.get_size())

    def found(self) -> bytes:
        """What stands behind the bytes."""
        return ctypes.string_at(self.inner.data_ptr + self.inner.get_size(), SEAL_BYTES)


def _parts(key: Any) -> tuple[str, ...]:
    """The fields of a server's ``ObjectKey``, or the text of an in-process key."""
    if not hasattr(key, "kv_rank"):
        return (key.to_string(),)
    return key.model_name, f"{key.kv_rank:x}", f"{key.object_group_id:x}", key.chunk_hash.hex(), key.cache_salt


def fingerprint_in(name: str) -> str:
    """The KV fingerprint at the end of a model's name in a key, or nothing."""
    match = _FINGERPRINT.search(name)
    return match[0] if match else ""
