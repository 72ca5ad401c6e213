"""Test only: makes the CPU attention kernel read wrong bytes from the KV cache.

Put this folder on ``PYTHONPATH`` and set ``KV_SABOTAGE`` to the reads that shall go wrong:

``prefill``  tokens that find their context in a cache (prefix hits, external hits)
``decode``   tokens that are generated one by one
``all``      both

A request's first block is read with every sign bit flipped; the cache itself is restored right after, so every run
goes wrong in the same way and nothing else does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import wrapt

KIND = os.environ.get("KV_SABOTAGE", "")


def _victims(metadata: Any, block_size: int) -> list[int]:
    """Physical numbers of the blocks to read wrongly: the first of each request that has one behind it."""
    starts = metadata.query_start_loc.tolist()
    blocks = []
    for row, (begin, end) in enumerate(pairwise(starts)):
        length = end - begin
        behind = int(metadata.seq_lens[row]) - length
        phase = "decode" if length == 1 else "prefill"
        if behind >= block_size and KIND in (phase, "all"):
            blocks.append(int(metadata.block_table[row, 0]))
    return sorted(set(blocks))


@contextmanager
def _flipped(kv_cache: Any, blocks: list[int]) -> Iterator[None]:
    import torch

    bits = kv_cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[kv_cache.element_size()])
    sign = torch.iinfo(bits.dtype).min or 0x80
    kept = bits[blocks].clone()
    bits[blocks] = kept ^ sign
    try:
        yield
    finally:
        bits[blocks] = kept


def _forward(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del instance
    kv_cache, metadata = args[4], args[5]
    blocks = _victims(metadata, kv_cache.shape[2]) if metadata is not None else []
    if not blocks:
        return wrapped(*args, **kwargs)
    with _flipped(kv_cache, blocks):
        return wrapped(*args, **kwargs)


def _sabotage(module: Any) -> None:
    print(f"KV sabotage of {KIND} reads in pid {os.getpid()}", file=sys.stderr, flush=True)
    wrapt.wrap_function_wrapper(module, "CPUAttentionBackendImpl.forward", _forward)


if KIND:
    wrapt.register_post_import_hook(_sabotage, "vllm.v1.attention.backends.cpu_attn")
