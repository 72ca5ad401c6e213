"""Known bytes in blocks of a worker's KV tensors: written through each layer's own view, and read back.

Tensors are torch's; nothing here knows of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["VALUES", "Blocks", "Pages"]

VALUES = 256
"""Byte values. A block of at least as many bytes holds all of them: every NaN and infinity pattern of every dtype."""

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class Blocks:
    """Blocks to use, and what tells one use from another.

    Attributes:
        ids: Physical block numbers in the order of their tokens.
        seed: Decides the bytes. Ranks that hold the same bytes by design are given the same.
    """

    ids: tuple[int, ...]
    seed: int


class Pages:
    """One layer's pages in its tensor of shape ``[pages, ...]``; a block is ``pages // blocks`` pages in a row."""

    def __init__(self, name: str, tensor: Any, blocks: int) -> None:
        import torch

        self.name = name
        self._tensor = tensor.view(getattr(torch, _INTEGERS[tensor.element_size()]))
        self._pages_a_block, rest = divmod(tensor.shape[0], blocks)
        if rest or not self._pages_a_block:
            raise ValueError(f"{name} has {tensor.shape[0]} pages for {blocks} blocks")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer on this rank."""
        return int(self._tensor[0].numel() * self._tensor.element_size() * self._pages_a_block)

    def _rows(self, ids: Sequence[int]) -> Any:
        import torch

        first = torch.tensor(ids, device=self._tensor.device) * self._pages_a_block
        return (first[:, None] + torch.arange(self._pages_a_block, device=self._tensor.device)).flatten()

    def _wanted(self, blocks: Blocks) -> Any:
        """The bytes of ``blocks`` in this layer, as they lie in the tensor."""
        import torch

        pages = [_bytes(f"{blocks.seed}/{self.name}/{index}", self.block_bytes) for index in range(len(blocks.ids))]
        shape = (len(blocks.ids) * self._pages_a_block, *self._tensor.shape[1:])
        return torch.stack(pages).view(self._tensor.dtype).view(shape).to(self._tensor.device)

    def write(self, blocks: Blocks) -> None:
        """Put the known bytes into the blocks."""
        self._tensor[self._rows(blocks.ids)] = self._wanted(blocks)

    def wipe(self, ids: Sequence[int]) -> None:
        """Fill the blocks with zeros."""
        self._tensor[self._rows(ids)] = 0

    def differing(self, blocks: Blocks) -> int:
        """How many bytes of the blocks are not the known ones."""
        import torch

        found = self._tensor[self._rows(blocks.ids)].contiguous()
        wanted = self._wanted(blocks)
        return int((found.view(torch.uint8) != wanted.view(torch.uint8)).sum())


def _bytes(name: str, count: int) -> Any:
    """``count`` random bytes that ``name`` decides, the first of which are all values there are."""
    import zlib

    import torch

    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    found = torch.randint(0, VALUES, (count,), dtype=torch.uint8, generator=source)
    start = torch.randperm(VALUES, generator=source)[:count].to(torch.uint8)
    found[: len(start)] = start
    return found


def layers_of(tensors: Mapping[str, Any], blocks: int) -> Iterable[Pages]:
    """The pages of every layer; a layer may keep several tensors, as recurrent ones do."""
    for name, tensor in tensors.items():
        parts = tensor if isinstance(tensor, (list, tuple)) else (tensor,)
        for index, part in enumerate(parts):
            yield Pages(name if len(parts) == 1 else f"{name}[{index}]", part, blocks)
