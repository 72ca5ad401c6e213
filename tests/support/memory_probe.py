"""The memory profiling of one release's GPU worker on a pretended device.

Runs in an interpreter of its own (:mod:`support.releases`). Real in it: ``Worker.determine_available_memory``, the
snapshots, ``memory_profiling``, the configuration, the KV cache planning. What can't run without a GPU are torch's and
the driver's questions to the device: :class:`Device` answers them, with numbers that each scenario injects. The model
runner is one that does nothing but move those numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from support.patching import patch_states, take_back
from support.planning import kv_cache_configs
from support.tiny_config import tiny_config
from support.told_executor import told_executor

__all__ = ["outcomes"]

GIB = 1 << 30
DEVICE = "cuda:0"
BLOCK_BYTES = 16384
"""4 layers, block size 16, one KV head of 64, float16."""


@dataclass
class Device:
    """A GPU of 96 GiB with a neighbour on it, in bytes."""

    neighbour: int = 13 * GIB
    torch: int = 0
    allocated: int = 0
    peak: int = 0
    context: int = 0
    total: int = 96 * GIB

    @property
    def free(self) -> int:
        return self.total - self.neighbour - self.torch - self.context

    def install(self) -> None:
        """Answer what vLLM and torch ask of a device."""
        from vllm.platforms import current_platform

        accelerator: Any = torch.accelerator
        accelerator.memory_stats = lambda *_: {
            "allocated_bytes.all.peak": self.peak,
            "allocated_bytes.all.current": self.allocated,
        }
        accelerator.get_memory_info = lambda *_: (self.free, self.total)
        accelerator.memory_reserved = lambda *_: self.torch
        accelerator.empty_cache = accelerator.reset_peak_memory_stats = accelerator.synchronize = lambda *_: None
        platform: Any = type(current_platform)
        platform.mem_get_info = staticmethod(accelerator.get_memory_info)  # up to 0.25
        platform.current_device = staticmethod(lambda: DEVICE)

    def load(self, weights: int) -> None:
        self.torch = self.allocated = self.peak = weights
        self.context = GIB // 2


class _Runner:
    """A model runner whose profile run has a peak of 2 GiB above the weights, and a neighbour that moves meanwhile."""

    def __init__(self, device: Device, weights: int, freed: int) -> None:
        self.device, self.freed = device, freed
        self.model_memory_usage = weights

    def profile_run(self, **_: Any) -> None:
        self.device.peak = self.device.allocated + 2 * GIB
        self.device.neighbour -= self.freed


@cache
def _tiny() -> Any:
    return tiny_config(gpu_memory_utilization=0.7, block_size=16)


def _config(*, given_bytes: int | None = None, override: int | None = None, ranks: int = 1, rank: int = 0) -> Any:
    """Made before anything else of vLLM is imported: it settles the platform."""
    config = _tiny()
    config.parallel_config.data_parallel_size, config.parallel_config.data_parallel_index = ranks, rank
    config.cache_config.kv_cache_memory_bytes = given_bytes
    config.cache_config.num_gpu_blocks_override = override
    return config


def _worker(device: Device, *, weights: int, freed: int = 0, given_bytes: int | None = None) -> Any:
    """The release's worker after loading a model of ``weights`` bytes; the KV cache may have what 70 % leaves."""
    config = _config(given_bytes=given_bytes)
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.gpu_worker import Worker

    worker = Worker(config, local_rank=0, rank=0, distributed_init_method="env://")
    device.install()
    worker.device = torch.device(DEVICE)
    worker.init_snapshot = MemorySnapshot(device=worker.device)
    worker.requested_memory = int(device.total * 0.7)
    worker.model_runner = _Runner(device, weights, freed)
    device.load(weights)
    return worker


def _outcome(*, total: int = 96 * GIB, **scenario: Any) -> Any:
    try:
        return _worker(Device(total=total), **scenario).determine_available_memory()
    except Exception as error:  # noqa: BLE001  (the test looks at what it is)
        return f"{type(error).__name__}: {error}"


def _plan(override: int | None, blocks: list[int]) -> Any:
    config = _config(override=override, ranks=2, rank=1)
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)
    specs = [{f"model.layers.{layer}.attn": spec for layer in range(4)} for _ in blocks]
    executor = told_executor(config, [count * BLOCK_BYTES for count in blocks])
    try:
        executor.initialize_from_config(kv_cache_configs(config, specs, executor.determine_available_memory()))
    except Exception as error:  # noqa: BLE001  (the test looks at what it is)
        return f"{type(error).__name__}: {error}"
    return executor.allocated


SCENARIOS: dict[str, dict[str, Any]] = {
    "alone": {"weights": 4 * GIB},
    "freed less than was taken": {"weights": 4 * GIB, "freed": 2 * GIB},
    "freed more than was taken": {"weights": 4 * GIB, "freed": 8 * GIB},
    "freed beyond the limit": {"weights": GIB, "freed": 13 * GIB, "total": 24 * GIB},
    "bytes that fit": {"weights": 4 * GIB, "given_bytes": 60 * GIB},
    "bytes that do not fit": {"weights": 4 * GIB, "given_bytes": 79 * GIB},
}
PLANS: dict[str, tuple[int | None, list[int]]] = {
    "override that fits": (90, [100, 90]),
    "override that does not fit": (200, [200, 90]),
    "no override": (None, [100, 90]),
}
"""The override, and how many blocks each of two workers has memory for."""


def outcomes() -> dict[str, Any]:
    """Every scenario and plan with the patches and, after these were taken back, as stock has it."""
    patched = _all()
    states = patch_states()
    _back_to_stock()
    return {"states": states, "patched": patched, "stock": _all()}


def _all() -> dict[str, Any]:
    """Bytes for the KV cache, or blocks of each worker; the error where there is one."""
    measured = {name: _outcome(**scenario) for name, scenario in SCENARIOS.items()}
    return measured | {name: _plan(*case) for name, case in PLANS.items()}


def _back_to_stock() -> None:
    from vllm.utils import mem_utils
    from vllm.v1.worker import gpu_worker

    take_back()
    gpu_worker.memory_profiling = mem_utils.memory_profiling
