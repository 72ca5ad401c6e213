"""How a KV block holds keys and values, which vLLM release does it how, and what a torch dtype weighs. Pure data."""

from __future__ import annotations

from enum import Enum

from patches.framework.errors import ProfileError
from patches.framework.libraries import in_range

__all__ = ["ITEM_BYTES", "LAYOUTS", "Layout", "layout_of"]

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
"""Bytes of one element, by torch's name."""


class Layout(str, Enum):
    """A generation of vLLM's KV layout.

    SPLIT: keys and values in two halves of the whole cache. BLOCK_SPLIT: in two halves of each block.
    PACKED: each head's key and value side by side.
    """

    SPLIT = "split"
    BLOCK_SPLIT = "block_split"
    PACKED = "packed"

    def block_shape(self, tokens: int, heads: int, row: int, *, latent: bool) -> tuple[int, ...]:
        """Shape of one block.

        Args:
            tokens: Tokens of the block.
            heads: KV heads on one rank.
            row: Elements of one token in one layer on one rank, keys and values together.
            latent: Whether a token is one vector without keys and values (MLA).
        """
        if self is Layout.PACKED:
            return heads, tokens, row // heads
        return (tokens, row) if latent else (2, tokens, heads, row // (2 * heads))

    def token_axis(self, *, latent: bool) -> int:
        """Which axis of :meth:`block_shape` counts tokens."""
        return 0 if latent and self is not Layout.PACKED else 1


LAYOUTS = (
    (">=0.26,<0.34", Layout.PACKED, Layout.PACKED),
    (">=0.23,<0.26", Layout.BLOCK_SPLIT, Layout.PACKED),
    (">=0.19,<0.23", Layout.SPLIT, Layout.SPLIT),
)
"""vLLM releases, the layout of their GPU backends, and that of the CPU backend."""


def layout_of(release: str, *, on_cpu: bool) -> Layout:
    """The layout generation of a vLLM release.

    Raises:
        ProfileError: a release whose layout nobody has looked at.
    """
    for releases, on_gpu, of_cpu in LAYOUTS:
        if in_range(release, releases):
            return of_cpu if on_cpu else on_gpu
    raise ProfileError(
        f"vLLM {release} has an unknown KV layout",
        f"a release within {', '.join(releases for releases, _, _ in LAYOUTS)}",
        "Install a release that vllm-splint covers, or run without an external KV cache.",
    )
