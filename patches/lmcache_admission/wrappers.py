"""LMCache's own seams: where objects get their memory, where tiers are made, where files get their names."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from patches.framework import process
from patches.framework.errors import SplintError
from patches.framework.records import Seam
from patches.lmcache_admission import refused, registrations
from patches.lmcache_admission.room import allocate_with_room
from patches.lmcache_admission.serdes import take_layouts, take_tier

__all__ = ["allocate", "create_l2_adapter", "file_and_temporary", "register_layout"]


def allocate(seam: Seam) -> Callable[..., Any]:
    """Every object of the first level gets room for a seal."""
    original = seam.original

    @wraps(original)
    def allocated(self: Any, layout_desc: Any, count: int) -> Any:
        seam.count()
        return allocate_with_room(original, self, layout_desc, count)

    return allocated


def create_l2_adapter(seam: Seam) -> Callable[..., Any]:
    """Every tier is sealed, or refused."""
    original = seam.original

    @wraps(original)
    def created(config: Any, l1_memory_desc: Any = None) -> Any:
        from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config

        from patches.lmcache_admission.tiers import make_resp, prepare, seal_tier

        seam.count()
        tier = get_type_name_for_config(config)
        take_tier(config)
        prepare(tier, config)
        inner = make_resp(config) if tier == "resp" else original(config, l1_memory_desc)
        return seal_tier(tier, config, inner)

    return created


def file_and_temporary(seam: Seam) -> Callable[..., tuple[Path, Path]]:
    """A temporary name for each write: two writers of one key never share a file."""
    original = seam.original

    @wraps(original)
    def paths(self: Any, key: Any) -> tuple[Path, Path]:
        seam.count()
        file, temporary = original(self, key)
        return file, temporary.with_name(f"{uuid.uuid4().hex}.tmp")

    return paths


def register_layout(seam: Seam) -> Callable[..., None]:
    """A name stands for one layout, and one-byte KV for no lossy serde. The engine is refused, not the server."""
    original = seam.original

    @wraps(original)
    def register(
        self: Any, model_name: str, world_size: int, layout_desc: Any, *args: Any, group_layout_descs: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        seam.count()
        try:
            take_layouts(model_name, [layout_desc, *(group_layout_descs or {}).values()])
            registrations.check(self, model_name, world_size, layout_desc, group_layout_descs)
        except SplintError as error:
            _note_refused(str(error))
            raise
        original(self, model_name, world_size, layout_desc, *args, group_layout_descs=group_layout_descs, **kwargs)

    return register


def _note_refused(reason: str) -> None:
    """LMCache answers no registration that fails. The engine finds the reason in what the server says of itself."""
    current = process.current()
    if current is not None:
        count, _ = refused.said(current.facts)
        current.note(**{refused.FACT: {"count": count + 1, "reason": reason}})
