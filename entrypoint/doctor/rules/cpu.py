"""vLLM's CPU build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.doctor.rule import REFUSE, WARN, Rule

if TYPE_CHECKING:
    from entrypoint.doctor.reading import Reading

__all__ = ["RULES"]

TOPIC = "CPU"
NODES = Path("/sys/devices/system/node")


def _experts(reading: Reading) -> str | None:
    spread = reading.on_cpu and reading.moe and reading.dp > 1
    return f"experts on the CPU, data parallel {reading.dp}" if spread else None


def _memory(reading: Reading) -> str | None:
    several = reading.on_cpu and reading.dp * reading.tp * reading.pp > 1
    pinned = reading.variable("VLLM_CPU_KVCACHE_SPACE") or reading.number("kv_cache_memory_bytes")
    return f"{reading.dp * reading.tp * reading.pp} workers, no KV size" if several and not pinned else None


def _threads(reading: Reading) -> str | None:
    nodes = len(list(NODES.glob("node[0-9]*"))) or 1
    bound = reading.variable("VLLM_CPU_OMP_THREADS_BIND") in ("", "auto")
    crowded = reading.on_cpu and bound and reading.tp > nodes
    return f"tensor parallel {reading.tp}, {nodes} NUMA node(s), threads bound" if crowded else None


def _ray(reading: Reading) -> str | None:
    named = (reading.value("distributed_executor_backend"), reading.value("data_parallel_backend"))
    return "Ray on the CPU" if reading.on_cpu and "ray" in named else None


def _nixl(reading: Reading) -> str | None:
    packed = reading.on_cpu and reading.connector == "NixlConnector" and reading.quantised_kv
    return "NixlConnector on the CPU, a quantised KV cache" if packed else None


RULES = (
    Rule(
        id="cpu-experts",
        level=REFUSE,
        topic=TOPIC,
        what="The CPU backend lacks the collectives of expert and data parallelism.",
        why="The first batch ends the engine with 'NotImplementedError', or a worker dies without a word.",
        change="Leave the patch cpu_expert_parallel on (SPLINT_PATCHES).",
        found=_experts,
        patch="cpu_expert_parallel",
    ),
    Rule(
        id="cpu-memory",
        level=WARN,
        topic=TOPIC,
        what="Without a size each worker takes its KV cache from the whole machine's memory.",
        why="Two workers together want nearly twice what there is.",
        change="Set VLLM_CPU_KVCACHE_SPACE (GiB for each worker).",
        found=_memory,
    ),
    Rule(
        id="cpu-threads",
        level=REFUSE,
        topic=TOPIC,
        what="More tensor-parallel ranks than NUMA nodes, with threads bound to nodes.",
        why="vLLM stops on an assertion when it binds them.",
        change="VLLM_CPU_OMP_THREADS_BIND=nobind, or a list of cores for each rank.",
        found=_threads,
    ),
    Rule(
        id="cpu-ray",
        level=REFUSE,
        topic=TOPIC,
        what="Ray can't place workers of the CPU build.",
        why="The start ends in an error about the device key.",
        change="Leave the Ray back end out: processes of this machine are the default.",
        found=_ray,
    ),
    Rule(
        id="cpu-nixl",
        level=REFUSE,
        topic=TOPIC,
        what="NIXL on the CPU can't pack a quantised KV cache.",
        why="The engine ends when it registers the cache.",
        change="SPLINT_KV_DTYPE=model.",
        found=_nixl,
    ),
)
