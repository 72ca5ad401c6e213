"""Which release starts with which fault in its KV budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.doctor.rule import NOTE, REFUSE, WARN, Rule

if TYPE_CHECKING:
    from entrypoint.doctor.reading import Reading

__all__ = ["RULES", "TOPIC"]

TOPIC = "KV start-up"


def _packed_latent(reading: Reading) -> str | None:
    packed = reading.kv_dtype == "fp8_ds_mla" or (reading.model.sparse and reading.kv_dtype.startswith("fp8"))
    return f"KV dtype {reading.kv_dtype} with sparse latent attention" if packed else None


def _turboquant(reading: Reading) -> str | None:
    return f"KV dtype {reading.kv_dtype}" if reading.kv_dtype.startswith("turboquant_") else None


def _experts_unmeasured(reading: Reading) -> str | None:
    return f"experts over {reading.moe_ranks} ranks" if reading.moe and reading.moe_ranks > 1 else None


def _one_expert_rank(reading: Reading) -> str | None:
    random = reading.variable("VLLM_RANDOMIZE_DP_DUMMY_INPUTS") == "1"
    if random or not reading.moe or not reading.ep or reading.dp == 1:
        return None
    return f"expert parallelism, data parallel {reading.dp}, VLLM_RANDOMIZE_DP_DUMMY_INPUTS not 1"


def _with_graphs(reading: Reading) -> bool:
    return not reading.on_cpu and not reading.on("enforce_eager")


def _graphs(reading: Reading) -> str | None:
    off = reading.variable("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS") == "0"
    if off or not _with_graphs(reading) or not reading.moe or reading.dp == 1:
        return None
    return f"CUDA graphs, experts over {reading.moe_ranks} ranks"


def _graphs_unmeasured(reading: Reading) -> str | None:
    return "CUDA graphs" if _with_graphs(reading) else None


def _pinned(reading: Reading) -> str | None:
    """The flag that replaces measuring, as it stands."""
    for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if reading.number(name):
            return f"--{name.replace('_', '-')} {reading.number(name)}"
    return None


def _pinned_ranks(reading: Reading) -> str | None:
    found = _pinned(reading)
    return found if found and reading.dp * reading.tp * reading.pp > 1 else None


def _exact_fit(reading: Reading) -> str | None:
    found = reading.number("num_gpu_blocks_override")
    return f"--num-gpu-blocks-override {found}" if found else None


def _fitted_length(reading: Reading) -> str | None:
    fitted = reading.value("max_model_len") in (-1, "auto", "-1")
    return f"--max-model-len auto, data parallel {reading.dp}" if fitted and reading.dp > 1 else None


def _plan(reading: Reading) -> str | None:
    on = reading.variable_on("VLLM_ENABLE_STARTUP_PLAN") and reading.dp > 1
    return f"VLLM_ENABLE_STARTUP_PLAN=1, data parallel {reading.dp}" if on else None


def _hybrid_ranks(reading: Reading) -> str | None:
    return f"a hybrid model, data parallel {reading.dp}" if reading.model.hybrid and reading.dp > 1 else None


def _hybrid_stages(reading: Reading) -> str | None:
    return f"a hybrid model, pipeline parallel {reading.pp}" if reading.model.hybrid and reading.pp > 1 else None


def _in_step(reading: Reading) -> str | None:
    return f"experts, data parallel {reading.dp}" if reading.moe and reading.dp > 1 else None


def _unequal(reading: Reading) -> str | None:
    return f"experts, data parallel {reading.dp}" if reading.moe and reading.dp > 1 and not _pinned(reading) else None


RULES = (
    Rule(
        id="packed-latent-kv",
        level=REFUSE,
        topic=TOPIC,
        what="The packed fp8 cache of sparse latent attention is allocated in one shape and viewed in another.",
        why="The start ends with \"shape '[128, 64, 576]' is invalid for input of size 5373952\", or the like.",
        change="vLLM 0.26 or later, or SPLINT_KV_DTYPE=model.",
        found=_packed_latent,
        upstream=("vllm#47722", "vllm#48379"),
        vllm=">=0.25,<0.26",
        patch="mla_kv_spec",
    ),
    Rule(
        id="turboquant-kv",
        level=REFUSE,
        topic=TOPIC,
        what="TurboQuant layers are taken for unquantised ones where the KV cache is laid out.",
        why="The start ends with \"Unknown TurboQuant cache dtype: 'auto'\".",
        change="vLLM 0.28 or later, or another KV dtype.",
        found=_turboquant,
        upstream=("vllm#47604",),
        vllm=">=0.25,<0.26",
        patch="turboquant_kv_spec",
    ),
    Rule(
        id="experts-unmeasured",
        level=WARN,
        topic=TOPIC,
        what="The measuring run sends no token to any expert: all are marked as padding.",
        why="The experts' memory is not measured, the KV pool becomes too large, and serving runs out of memory.",
        change="vLLM 0.31 or later, or a lower --gpu-memory-utilization.",
        found=_experts_unmeasured,
        upstream=("vllm#57270",),
        vllm=">=0.27,<0.31",
        patch="profile_routing",
    ),
    Rule(
        id="one-expert-rank",
        level=WARN,
        topic=TOPIC,
        what="The measuring run sends every token to the experts of one rank: its input is all zeros.",
        why="That rank measures a peak that never comes, and with one budget for all its small pool is everybody's.",
        change="Set VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1.",
        found=_one_expert_rank,
        upstream=("vllm#57262",),
        patch="dummy_token_routing",
    ),
    Rule(
        id="graphs-overestimated",
        level=NOTE,
        topic=TOPIC,
        what="The memory of CUDA graphs is extrapolated from a few: up to three times too much was seen with experts.",
        why="The KV pool is smaller than it could be.",
        change="Compare with VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 and a lower --gpu-memory-utilization.",
        found=_graphs,
        upstream=("vllm#45178",),
        vllm=">=0.21",
    ),
    Rule(
        id="graphs-unmeasured",
        level=NOTE,
        topic=TOPIC,
        what="Where vLLM takes its newer model runner, no memory is reserved for CUDA graphs.",
        why="It runs out of memory while it captures them, or later under load.",
        change="Lower --gpu-memory-utilization, or vLLM 0.30 or later.",
        found=_graphs_unmeasured,
        upstream=("vllm#49224",),
        vllm=">=0.22,<0.30",
    ),
    Rule(
        id="pinned-unchecked",
        level=WARN,
        topic=TOPIC,
        what="A pinned KV size is never compared with what is free.",
        why="The rank with the least free memory dies alone, and the others wait for it.",
        change="Pin what the fullest GPU has free, on every rank and node alike.",
        found=_pinned_ranks,
        upstream=("vllm#22234",),
    ),
    Rule(
        id="exact-fit",
        level=WARN,
        topic=TOPIC,
        what="The check of the KV pool forgets the block that is never handed out.",
        why="A pool of exactly one longest request starts well and then makes no token, without an error.",
        change="Give at least one block more than max_model_len takes.",
        found=_exact_fit,
        upstream=("vllm#35541", "vllm#47272"),
        vllm="<0.29",
        patch="kv_null_block",
    ),
    Rule(
        id="fitted-length",
        level=WARN,
        topic=TOPIC,
        what="A fitted max_model_len differs from rank to rank.",
        why="A request may be accepted that the rank which gets it can't serve.",
        change="Give --max-model-len a number.",
        found=_fitted_length,
        patch="kv_budget",
    ),
    Rule(
        id="startup-plan",
        level=WARN,
        topic=TOPIC,
        what="All data-parallel ranks share one file with the remembered KV size; the last one wins.",
        why="A rank that finds it skips measuring runs that the others wait in together.",
        change="Unset VLLM_ENABLE_STARTUP_PLAN with data parallelism.",
        found=_plan,
        upstream=("vllm#47388",),
        vllm=">=0.26",
        patch="startup_plan_rank",
    ),
    Rule(
        id="hybrid-ranks",
        level=WARN,
        topic=TOPIC,
        what="The number of state blocks is decided by each rank alone.",
        why="Where max_num_seqs is above it on one rank, that rank refuses or captures other graphs: the others wait.",
        change="Give --max-num-seqs well below what the smallest rank holds.",
        found=_hybrid_ranks,
        upstream=("vllm#49064",),
    ),
    Rule(
        id="hybrid-stages",
        level=WARN,
        topic=TOPIC,
        what="Stages of a hybrid model can't agree on a KV layout.",
        why="The start ends with 'Workers disagree on supported KV cache layouts'.",
        change="Use tensor instead of pipeline parallelism.",
        found=_hybrid_stages,
        upstream=("vllm#54710",),
        vllm=">=0.30",
    ),
    Rule(
        id="unequal-pools",
        level=NOTE,
        topic=TOPIC,
        what="Each data-parallel rank measures and plans its KV pool alone.",
        why="Ranks differ by what else is on their GPUs; the smallest preempts first, and all wait for it.",
        change="Equal, empty GPUs; or one --kv-cache-memory-bytes for all.",
        found=_unequal,
        upstream=("vllm#46106", "vllm#54354"),
        patch="kv_budget",
    ),
    Rule(
        id="silent-rank",
        level=WARN,
        topic=TOPIC,
        what="A data-parallel rank that fails at start does not tell the others.",
        why="They wait in a collective until somebody ends them, and their logs name no reason.",
        change="Look at the logs of every rank; the first error counts.",
        found=_in_step,
        upstream=("vllm#35478",),
        patch="kv_budget",
    ),
)
