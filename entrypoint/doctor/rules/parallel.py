"""Expert and data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.doctor.rule import NOTE, REFUSE, WARN, Rule

if TYPE_CHECKING:
    from entrypoint.doctor.reading import Reading

__all__ = ["RULES"]

TOPIC = "EP/DP"


def _experts_split(reading: Reading) -> str | None:
    if not reading.model.experts or reading.ep or reading.dp == 1:
        return None
    return f"{reading.model.experts} experts, data parallel {reading.dp}, no --enable-expert-parallel"


def _dense(reading: Reading) -> str | None:
    return "--enable-expert-parallel" if reading.ep and reading.model.known and not reading.model.experts else None


def _independent(reading: Reading) -> str | None:
    return f"data parallel {reading.dp}" if reading.dp > 1 and reading.model.known and not reading.moe else None


def _odd_heads(reading: Reading) -> str | None:
    heads = reading.model.heads
    return f"{heads} heads, tensor parallel {reading.tp}" if heads and heads % reading.tp else None


def _copied_heads(reading: Reading) -> str | None:
    heads = reading.model.kv_heads
    if not heads or reading.tp <= heads:
        return None
    kind = "one latent head (MLA)" if reading.model.latent else f"{heads} KV head(s)"
    return f"{kind}, tensor parallel {reading.tp}"


def _balanced(reading: Reading) -> str | None:
    return f"--enable-eplb, data parallel {reading.dp}" if reading.on("enable_eplb") and reading.dp > 1 else None


def _unbalanced_experts(reading: Reading) -> str | None:
    return "--enable-eplb" if reading.on("enable_eplb") and not reading.ep else None


def _deepep(reading: Reading) -> str | None:
    backend = str(reading.value("all2all_backend") or "")
    return f"--all2all-backend {backend}" if "low_latency" in backend else None


def _draft(reading: Reading) -> str | None:
    drafts = reading.value("speculative_config") or reading.value("spec_method")
    return f"a draft model, data parallel {reading.dp}" if drafts and reading.dp > 1 and reading.moe else None


def _elastic(reading: Reading) -> str | None:
    return "--enable-elastic-ep" if reading.on("enable_elastic_ep") else None


def _moriio(reading: Reading) -> str | None:
    reads = str(reading.subject.arguments.extra_config.get("read_mode", "")).lower() in ("true", "1")
    reads = reads or reading.variable_on("VLLM_MORIIO_CONNECTOR_READ_MODE")
    prefills = reading.transfer.get("kv_role") != "kv_consumer"
    if reading.connector != "MoRIIOConnector" or not (reads and prefills) or reading.dp == 1:
        return None
    return f"MoRIIOConnector in READ mode, data parallel {reading.dp} on the prefill side"


def _one_engine_id(reading: Reading) -> str | None:
    fixed = reading.transfer.get("engine_id")
    nodes = reading.value("data_parallel_address") or reading.value("data_parallel_start_rank") is not None
    return f"engine_id {fixed}, several nodes" if fixed and reading.dp > 1 and nodes else None


RULES = (
    Rule(
        id="experts-split",
        level=WARN,
        topic=TOPIC,
        what="Without expert parallelism every expert is cut in slices over all ranks (DP x PCP x TP).",
        why="MoE layers fall back to pure tensor parallelism: small slices, and an all-reduce over all ranks a layer.",
        change="Give --enable-expert-parallel.",
        found=_experts_split,
    ),
    Rule(
        id="experts-of-a-dense-model",
        level=REFUSE,
        topic=TOPIC,
        what="Expert parallelism for a model without experts.",
        why="vLLM stops at start ('Number of experts in the model must be greater than 0').",
        change="Leave --enable-expert-parallel out.",
        found=_dense,
    ),
    Rule(
        id="dense-ranks",
        level=NOTE,
        topic=TOPIC,
        what="The data-parallel ranks of a dense model are engines of their own.",
        why="They share no step and no budget: KV pools may differ in size, and one may end without the others.",
        change="Nothing; watch each rank.",
        found=_independent,
    ),
    Rule(
        id="heads-do-not-divide",
        level=REFUSE,
        topic=TOPIC,
        what="The attention heads do not divide by the tensor-parallel size.",
        why="vLLM stops at start; expert parallelism does not change how heads are divided.",
        change="Choose a tensor-parallel size that divides the heads, and data parallelism for the rest of the GPUs.",
        found=_odd_heads,
    ),
    Rule(
        id="kv-copied",
        level=WARN,
        topic=TOPIC,
        what="Tensor-parallel ranks beyond the number of KV heads keep copies of the same KV cache.",
        why="The pool holds as many tokens as with fewer ranks: the memory of the others is lost to it.",
        change="Use data parallelism for attention (--data-parallel-size), --enable-expert-parallel for the experts.",
        found=_copied_heads,
    ),
    Rule(
        id="eplb-without-ep",
        level=REFUSE,
        topic=TOPIC,
        what="Expert load balancing without expert parallelism.",
        why="vLLM stops at start.",
        change="Give --enable-expert-parallel, or leave --enable-eplb out.",
        found=_unbalanced_experts,
    ),
    Rule(
        id="eplb-outside-the-budget",
        level=WARN,
        topic=TOPIC,
        what="The buffers of expert rearrangement are not in the memory that vLLM measures.",
        why="The first rearrangement, minutes after start, can run out of memory.",
        change="Lower --gpu-memory-utilization by a few hundredths on every rank, or use fewer redundant experts.",
        found=_balanced,
        upstream=("vllm#25597",),
    ),
    Rule(
        id="deepep-outside-the-budget",
        level=WARN,
        topic=TOPIC,
        what="DeepEP's low-latency buffers have a fixed size and are allocated after the KV budget was measured.",
        why="A start that just fits runs out of memory when the buffers come.",
        change="Lower --gpu-memory-utilization by a few hundredths on every rank.",
        found=_deepep,
        upstream=("vllm#20228",),
    ),
    Rule(
        id="draft-hang",
        level=WARN,
        topic=TOPIC,
        what="Ranks with a draft model can run different numbers of forward passes near max_model_len.",
        why="Expert parallelism runs in step: one pass more on one rank hangs all.",
        change="Keep prompts plus answers below max_model_len by the number of draft tokens, or leave the draft out.",
        found=_draft,
        upstream=("vllm#44185",),
    ),
    Rule(
        id="elastic-unmeasured",
        level=WARN,
        topic=TOPIC,
        what="A rank that is added later gets the KV budget of the first worker, whatever memory it has.",
        why="A GPU with less free memory runs out of it while it joins.",
        change="Add only equal, empty GPUs; pin the budget with --kv-cache-memory-bytes.",
        found=_elastic,
    ),
    Rule(
        id="moriio-read",
        level=REFUSE,
        topic=TOPIC,
        what="MoRIIO's READ mode reads data-parallel rank 0 of the prefill side, whichever rank has the KV.",
        why="Foreign KV under the right prompt: fluent, wrong answers.",
        change="Use WRITE mode, one prefill rank, or vLLM 0.27 or later.",
        found=_moriio,
        upstream=("vllm#46106", "vllm#46116"),
        vllm="<0.27",
        patch="moriio_dp_rank",
    ),
    Rule(
        id="engine-id-collides",
        level=REFUSE,
        topic=TOPIC,
        what="With a fixed engine_id the engines of several nodes get the same name: the suffix is the local rank.",
        why="The KV of two engines is mistaken for one another, or the transfer stops on an assertion.",
        change="Leave engine_id out of --kv-transfer-config, or give each node its own.",
        found=_one_engine_id,
        vllm="<0.25",
    ),
)
