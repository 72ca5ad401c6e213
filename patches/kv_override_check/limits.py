"""Whether a device holds the KV cache that was asked for by number. Nothing in here imports vLLM.

Every amount is in bytes and in whole blocks of one worker.
"""

from __future__ import annotations

from typing import Any

from patches.framework.errors import RefusedError

__all__ = ["KVCacheTooLargeError", "check_bytes", "check_override", "planned_bytes", "worker_name"]

BLOCKS = "--num-gpu-blocks-override"
BYTES = "--kv-cache-memory-bytes"


class KVCacheTooLargeError(RefusedError):
    """A worker was told to hold more KV cache than its device has memory for."""


def check_override(blocks: int, bytes_per_block: int, available_bytes: int, rank_name: str) -> None:
    """Hold a number of blocks against the memory that one worker has for them.

    Args:
        blocks: ``num_gpu_blocks_override``.
        bytes_per_block: What one block takes on this worker, over all of its layers.
        available_bytes: What the worker measured, or was given with ``--kv-cache-memory-bytes``.
        rank_name: How messages call the worker, ``DP1 worker 0``.

    Raises:
        KVCacheTooLargeError: the blocks do not fit.
    """
    needed = blocks * bytes_per_block
    if needed <= available_bytes:
        return
    fitting = max(0, available_bytes) // bytes_per_block
    raise KVCacheTooLargeError(
        f"{BLOCKS} {blocks} needs {needed} bytes of KV cache on {rank_name}, which has {available_bytes}",
        f"at most {fitting} blocks of {bytes_per_block} bytes there",
        f"Lower {BLOCKS} (one number for all ranks, so the smallest device decides) or leave it out; or give the KV"
        f" cache more memory with --gpu-memory-utilization, {BYTES} or, on CPU, VLLM_CPU_KVCACHE_SPACE.",
    )


def check_bytes(wanted_bytes: int, free_bytes: int, rank_name: str) -> None:
    """Hold ``--kv-cache-memory-bytes`` against the memory that is free on the worker's device, the model being loaded.

    Raises:
        KVCacheTooLargeError: the device has less.
    """
    if wanted_bytes <= free_bytes:
        return
    raise KVCacheTooLargeError(
        f"{BYTES} {wanted_bytes} on {rank_name}, where {free_bytes} bytes are free after the model was loaded",
        f"at most {free_bytes} bytes there, and room for the activations beside them",
        f"Lower {BYTES}, leave it out to have the memory measured, or end what else is on that device.",
    )


def planned_bytes(tensors: list[Any]) -> int:
    """What vLLM's planned ``KVCacheTensor`` objects of one worker allocate on its device.

    A tensor is an allocation of its own, but for packed ones (``block_stride``, since 0.24) and all of them since 0.29
    (``layers``), which lie in one.
    """
    on_device = [tensor for tensor in tensors if not getattr(tensor, "host_resident", False)]
    shared: list[int] = [tensor.size for tensor in on_device if _lies_in_shared(tensor)]
    own: list[int] = [tensor.size for tensor in on_device if not _lies_in_shared(tensor)]
    return max(shared, default=0) + sum(own)


def _lies_in_shared(tensor: Any) -> bool:
    return hasattr(tensor, "layers") or getattr(tensor, "block_stride", 0) > 0


def worker_name(parallel: Any, worker: int) -> str:
    """``DP1 worker 0``, or ``worker 0`` where there is one engine; read from a ``ParallelConfig``."""
    rank = parallel.data_parallel_index
    return f"DP{rank} worker {worker}" if parallel.data_parallel_size > 1 or rank > 0 else f"worker {worker}"
