"""The KV cache's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.doctor.rule import NOTE, REFUSE, WARN, Rule
from patches.framework import kv_dtype
from patches.framework.errors import RefusedError
from patches.framework.kv_dtype import AUTO

if TYPE_CHECKING:
    from entrypoint.doctor.reading import Reading

__all__ = ["RULES"]

TOPIC = "KV dtype"


def _declared(reading: Reading) -> str | None:
    return reading.model.declared_kv_quantisation if reading.kv_dtype == AUTO else None


def _conflict(reading: Reading) -> str | None:
    try:
        kv_dtype.words(reading.subject.arguments, reading.subject.environ)
    except RefusedError as error:
        return error.found
    return None


def _e5m2_checkpoint(reading: Reading) -> str | None:
    quantisation = reading.model.config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    wrong = method in ("fp8", "modelopt") or (method == "compressed-tensors" and reading.model.declared_kv_quantisation)
    return f"fp8_e5m2, a checkpoint quantised by {method}" if reading.kv_dtype == "fp8_e5m2" and wrong else None


def _scales(reading: Reading) -> str | None:
    return "--calculate-kv-scales" if reading.on("calculate_kv_scales") and reading.connector else None


def _int4_window(reading: Reading) -> str | None:
    window = reading.model.config.get("sliding_window")
    return "int4_per_token_head, sliding window" if reading.kv_dtype == "int4_per_token_head" and window else None


RULES = (
    Rule(
        id="pinned-otherwise",
        level=REFUSE,
        topic=TOPIC,
        what="SPLINT_KV_DTYPE and the command line do not agree, or the model's own dtype can't be told.",
        why="One setting decides, or none: every form of start refuses this.",
        change="Keep one of the two; with SPLINT_KV_DTYPE=model name the dtype by --dtype.",
        found=_conflict,
    ),
    Rule(
        id="declared-kv-dtype",
        level=NOTE,
        topic=TOPIC,
        what="The checkpoint declares a quantised KV cache, and auto follows it.",
        why="The cache is not in the model's dtype though nobody asked for that here.",
        change="SPLINT_KV_DTYPE=model for the model's own dtype.",
        found=_declared,
    ),
    Rule(
        id="e5m2-checkpoint",
        level=REFUSE,
        topic=TOPIC,
        what="An fp8_e5m2 cache with a checkpoint that is itself in fp8.",
        why="vLLM stops while it loads ('fp8_e5m2 kv-cache is not supported with fp8 checkpoints').",
        change="fp8_e4m3, or SPLINT_KV_DTYPE=model.",
        found=_e5m2_checkpoint,
    ),
    Rule(
        id="scales-in-no-key",
        level=REFUSE,
        topic=TOPIC,
        what="KV scales that are computed at start are in no key of an external cache.",
        why="The next start computes others, and reads the old bytes with them.",
        change="Leave --calculate-kv-scales out, or the connector.",
        found=_scales,
        vllm="<0.28",
    ),
    Rule(
        id="int4-window",
        level=WARN,
        topic=TOPIC,
        what="int4 per token and head with sliding-window layers breaks where the KV cache is laid out.",
        why="The start ends with a shape error.",
        change="Another KV dtype.",
        found=_int4_window,
        upstream=("vllm#48721",),
        vllm=">=0.25,<0.28",
    ),
)
