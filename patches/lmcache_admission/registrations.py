"""One name, one layout: what is registered under a name in the LMCache server is what its objects are."""

from __future__ import annotations

import threading
from typing import Any

from patches.framework.errors import MismatchError

__all__ = ["check"]

_LAYOUTS = "splint_layouts"
_lock = threading.Lock()


def check(registry: Any, name: str, world_size: int, layout: Any, groups: dict[int, Any] | None) -> None:
    """Hold a registration against the first one under the same name, whether or not that is still there.

    Objects stay in the cache when their engine goes; under another layout they would be read as something else.

    Args:
        registry: LMCache's ``LayoutDescRegistry``.
        name: The model's name in the keys, fingerprint and all.
        world_size: Ranks that share the name.
        layout: LMCache's ``MemoryLayoutDesc``.
        groups: The same by object group, where they differ.

    Raises:
        MismatchError: it is another.
    """
    wanted = {number: _described(each) for number, each in (groups or {0: layout}).items()}
    with _lock:
        first = vars(registry).setdefault(_LAYOUTS, {}).setdefault((name, world_size), wanted)
    if first != wanted:
        raise MismatchError(
            f"an engine that registers {wanted} under {name!r} with {world_size} rank(s)",
            f"{first}, as the objects under this name are",
            "Give engines of different KV layouts different names (vllm-splint in the engine does), and all pipeline"
            " stages the same number of layers; or start an LMCache server for each.",
        )


def _described(layout: Any) -> str:
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )
