"""A remote connector whose objects have seals, and that allocates nothing for a header that is not this engine's."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Sequence
from typing import Any

from patches.framework import tallies
from patches.lmcache_admission.checking import GONE
from patches.lmcache_admission.room import Sealed, has_room
from patches.lmcache_admission.seal import difference
from patches.lmcache_admission_in_process.objects import as_lists

__all__ = ["CheckedConnector"]

logger = logging.getLogger(__name__)

MALFORMED = (ValueError, KeyError, struct.error)
"""What LMCache's readers raise on headers and bodies that are not theirs."""


class CheckedConnector:
    """Stands before LMCache's connector; what it does not define is the connector's own.

    Args:
        inner: LMCache's connector; its allocations go through here from now on.
        tier: Its name in counters.
        layerwise: Whether objects hold one layer each, whose shapes the connector does not know beforehand.
    """

    def __init__(self, inner: Any, tier: str, *, layerwise: bool) -> None:
        self._inner = inner
        self._tier = tier
        self._memory = _Allocating(inner.local_cpu_backend, inner, tier, layerwise=layerwise)
        self._given_up: set[str] = set()
        inner.local_cpu_backend = self._memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def exists(self, key: Any) -> bool:
        """Whether there is an object that has not turned out to be useless."""
        return key.to_string() not in self._given_up and bool(await self._inner.exists(key))

    def exists_sync(self, key: Any) -> bool:
        """As :meth:`exists`, from a thread that is not the loop's."""
        if key.to_string() in self._given_up:
            return False
        if self._tier != "resp":
            return bool(self._inner.exists_sync(key))
        # LMCache's own question from another thread waits for ever where the answer comes before it is waited for.
        return bool(asyncio.run_coroutine_threadsafe(self._inner.exists(key), self._inner.loop).result())

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Seal and store."""
        for view in await self._sealed([key], [memory_obj]):
            await self._inner.put(key, view)
            self._given_up.discard(key.to_string())

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Seal and store; nothing is stored where one of them has no room for its seal."""
        views = await self._sealed(keys, memory_objs)
        if views:
            await self._inner.batched_put(list(keys), views)

    async def _sealed(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> list[Sealed]:
        if not all(has_room(found) for found in memory_objs):
            logger.error("No room for a seal behind %d object(s) for the %s tier: not stored", len(keys), self._tier)
            return []
        views = [Sealed(key, found) for key, found in zip(keys, memory_objs, strict=True)]
        await asyncio.get_running_loop().run_in_executor(None, _seal, views)
        return views

    async def get(self, key: Any) -> Any:
        """The object, or None where there is none that is this key's."""
        seen = self._memory.seen()
        try:
            view = await self._inner.get(key)
        except MALFORMED as error:
            await self._refuse(key, "damaged", f"what is stored there can't be read: {error}")
            return None
        if view is None:
            await self._unread(key, seen)
        return await self._checked(key, view)

    async def _unread(self, key: Any, seen: tuple[int, int]) -> None:
        """Forget what is there and could not be read, unless it was for want of memory, as none was since ``seen``."""
        short, strange = (now - before for now, before in zip(self._memory.seen(), seen, strict=True))
        if short or not await self._inner.exists(key):
            return
        if not strange:
            tallies.miss("damaged", self._tier, "what is stored there can't be read")
        await self._forget(key)

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """For each key the object, or None."""
        if not self._inner.support_batched_get():
            return list(await asyncio.gather(*(self.get(key) for key in keys)))
        found = await self._inner.batched_get(list(keys))
        return [await self._checked(key, view) for key, view in zip(keys, found, strict=True)]

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """Objects up to the first key that has none."""
        found = await self.batched_get(keys)
        good = next((place for place, each in enumerate(found) if each is None), len(found))
        for late in found[good:]:
            if late is not None:
                late.ref_count_down()
        return found[:good]

    async def _checked(self, key: Any, view: Sealed | None) -> Any:
        """The object behind a view that has its seal; else it is given back, and forgotten where that can be."""
        if view is None:
            return None
        view.key = key
        reason = await asyncio.get_running_loop().run_in_executor(None, self._difference, key, view)
        if reason is None:
            return view.inner
        view.inner.ref_count_down()
        await self._refuse(key, reason, "what is stored there is not what the key stands for; it is not used")
        return None

    def _difference(self, key: Any, view: Sealed) -> str | None:
        if self._tier == "fs":
            header = self._inner.remote_metadata_bytes if self._inner.save_chunk_meta else 0
            try:
                size = self._inner._get_file_path(key).stat().st_size
            except OSError:
                return GONE
            if size != header + view.get_size():
                return "wrong_size"
        return difference(view.expected(), view.found())

    async def _refuse(self, key: Any, reason: str, detail: str) -> None:
        tallies.miss(reason, self._tier, detail)
        await self._forget(key)

    async def _forget(self, key: Any) -> None:
        """Delete what is of no use, so that the next store is not taken for one that is there already."""
        name = key.to_string()
        match self._tier:
            case "fs":
                self._inner.remove_sync(key)
            case "redis":
                await self._inner.connection.delete(f"{name}metadata", f"{name}kv_bytes")
            case "resp":
                self._inner.client._client.submit_batch_delete([name])
            case _:  # lm:// has no way to delete: this engine finds it no more, and replaces it
                self._given_up.add(name)


class _Allocating:
    """The memory of a connector: objects with a place for their seal, and none for a strange header."""

    def __init__(self, backend: Any, connector: Any, tier: str, *, layerwise: bool) -> None:
        self._backend, self._connector, self._tier, self._layerwise = backend, connector, tier, layerwise
        self._short = self._foreign = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any = None, *args: Any, **kwargs: Any) -> Sealed | None:
        """As LMCache's own; None, as where memory is short, also where the header is not one of this engine's."""
        groups, kinds = as_lists(shapes, dtypes)
        reason = self._strange(groups, kinds, fmt)
        if reason is not None:
            self._foreign += 1
            tallies.miss(reason, self._tier, f"a header of {kinds} {groups}; it is not used")
            return None
        found = self._backend.allocate(groups, kinds, fmt, *args, **kwargs)
        if found is None or not has_room(found):
            self._short += 1
            return None
        return Sealed(None, found)

    def seen(self) -> tuple[int, int]:
        """How often there was no memory, and how often a header was strange."""
        return self._short, self._foreign

    def _strange(self, shapes: list[Any], dtypes: list[Any], fmt: Any) -> str | None:
        wanted = self._connector
        if len(shapes) != len(wanted.meta_shapes):
            return "wrong_groups"
        if dtypes != list(wanted.meta_dtypes):
            return "wrong_dtype"
        if self._layerwise:
            fits = all(
                0 < shape.numel() <= full.numel() for shape, full in zip(shapes, wanted.meta_shapes, strict=True)
            )
            return None if fits else "wrong_shape"
        if fmt != wanted.meta_fmt:
            return "wrong_format"
        axis = fmt.token_dim()
        fits = all(_is_part(shape, full, axis) for shape, full in zip(shapes, wanted.meta_shapes, strict=True))
        return None if fits else "wrong_shape"


def _is_part(shape: Sequence[int], full: Sequence[int], axis: int) -> bool:
    """Whether ``shape`` is ``full`` with as many tokens or fewer."""
    if len(shape) != len(full) or not 0 < shape[axis] <= full[axis]:
        return False
    return all(found == wanted for place, (found, wanted) in enumerate(zip(shape, full, strict=True)) if place != axis)


def _seal(views: Sequence[Sealed]) -> None:
    for view in views:
        view.seal()
