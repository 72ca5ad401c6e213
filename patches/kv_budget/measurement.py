"""What a DP rank says about itself: before it loads anything, and after it has measured its memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Hello", "Measurement", "Place", "from_json", "to_json"]


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        dp_rank: Rank in the data-parallel group.
        host: Host name, for messages.
        device: Device or devices, for messages.
    """

    dp_rank: int
    host: str
    device: str

    @property
    def name(self) -> str:
        """The rank as messages write it."""
        return f"DP{self.dp_rank} ({self.host}, {self.device})"


@dataclass(frozen=True)
class Hello(Place):
    """A rank's place and flags, known before its model is loaded.

    Attributes:
        lifeline: Address and port of a connection that lasts as long as its process, until all engines are up.
        flags: What must be, or usually is, the same on every rank.
    """

    lifeline: tuple[str, int]
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement(Place):
    """What a rank measured before its KV cache was planned.

    Attributes:
        memory: Bytes for the KV cache, one number a worker of this engine (TP x PP), in worker order.
        bytes_per_block: Bytes of one block in each worker; 0 for one without KV layers (a pipeline stage may be one).
        block_size: Tokens a block.
        override: ``num_gpu_blocks_override``, in blocks, or None.
        facts: What must be the same on every rank: specification digest, layout, length, patch set.
        cause: Flags that explain a difference, for messages.
    """

    memory: tuple[int, ...]
    bytes_per_block: tuple[int, ...]
    block_size: int
    override: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    cause: Mapping[str, Any] = field(default_factory=dict)

    def blocks_in(self, memory: tuple[int, ...]) -> int:
        """Blocks that ``memory`` (bytes a worker) holds in the workers' own block sizes; the smallest worker decides.

        0 where no worker has KV layers.
        """
        held = [have // each for have, each in zip(memory, self.bytes_per_block, strict=True) if each]
        return max(0, min(held, default=0))

    @property
    def blocks(self) -> int:
        """Blocks that this rank holds by itself."""
        return self.blocks_in(self.memory)


def to_json(record: Hello | Measurement) -> str:
    """The record as it travels."""
    return json.dumps(asdict(record), sort_keys=True)


def from_json(kind: type[Any], text: str | bytes) -> Any:
    """The record that :func:`to_json` wrote, of the given kind.

    Raises:
        TypeError: it has other fields, or is no record at all.
        ValueError: it is no JSON.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} expected, not {data!r:.40}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})
