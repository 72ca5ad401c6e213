"""A plan as JSON and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from entrypoint.planning.sizes import gib

if TYPE_CHECKING:
    from rich.console import RenderableType

    from entrypoint.planning.plan import Outcome, Plan, Stage

__all__ = ["SCHEMA", "as_json", "render"]

SCHEMA = 1


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs: bytes, blocks and tokens, never GiB."""
    split, shape = plan.split, plan.shape
    return {
        "schema": SCHEMA,
        "model": {"architecture": shape.architecture, "layers": shape.layers, "dtype": plan.dtype}
        | {"quantisation": shape.quantisation.name, "experts": shape.experts.number if shape.experts else 0},
        "parallel": {"tp": split.tp, "pp": split.pp, "dp": split.dp, "ep": split.ep, "devices": split.devices},
        "device": {"memory_bytes": plan.deployment.device_memory, "taken_bytes": plan.requested},
        "stages": [_stage_json(plan, index, stage) for index, stage in enumerate(plan.stages)],
        "assumed": {
            name: {"low_bytes": found.low, "high_bytes": found.high, "basis": found.basis, "why": found.why}
            for name, found in plan.ranges.items()
        },
        "kv": {"dtype": plan.deployment.kv_dtype, "block_size": plan.block_size, "max_model_len": plan.max_model_len},
        "low": _outcome_json(plan.low),
        "high": _outcome_json(plan.high),
        "checked_with_vllm": plan.checked_with,
    }


def _stage_json(plan: Plan, index: int, stage: Stage) -> dict[str, Any]:
    return {
        "layers": [stage.layers.start, stage.layers.stop],
        "weights_bytes": stage.weights,
        "kv_token_bytes": stage.token_bytes,
        "kv_block_bytes": stage.token_bytes * plan.block_size,
        "kv_bytes": [plan.low.kv_bytes[index], plan.high.kv_bytes[index]],
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    budget = outcome.budget
    return {
        "fits": budget is not None,
        "blocks_per_dp_rank": budget.per_dp_blocks if budget else 0,
        "blocks_seen_by_an_ep_rank": budget.per_ep_view_blocks if budget else 0,
        "tokens_per_dp_rank": budget.per_dp_tokens if budget else 0,
        "blocks": budget.num_blocks_global if budget else 0,
        "sequences_per_dp_rank": round(outcome.concurrency, 4),
    }


def render(plan: Plan) -> RenderableType:
    """The plan for people."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(_head(plan), style="bold"), _memory(plan), _blocks(plan), Text(_notes(plan), style="dim"))


def _head(plan: Plan) -> str:
    split = plan.split
    groups = [f"DP {split.dp}", f"TP {split.tp}", f"PP {split.pp}", *([f"EP {split.ep}"] if split.ep > 1 else [])]
    return (
        f"{plan.shape.architecture}, {plan.shape.layers} layers, weights {plan.dtype}"
        f" (quantisation: {plan.shape.quantisation.name})\n"
        f"{split.devices} x {gib(plan.deployment.device_memory)} GiB: {', '.join(groups)}"
    )


def _memory(plan: Plan) -> RenderableType:
    from rich.table import Table

    table = Table(title="GiB on the fullest device of each pipeline stage", title_justify="left")
    table.add_column("where the memory goes")
    for stage in plan.stages:
        table.add_column(f"layers {stage.layers.start} to {stage.layers.stop - 1}", justify="right")
    columns = len(plan.stages)
    table.add_row(f"taken by vLLM ({plan.deployment.part:.0%})", *[gib(plan.requested)] * columns)
    for part in dict.fromkeys(part for stage in plan.stages for part in stage.weights):
        table.add_row(f"weights: {part}", *(gib(stage.weights.get(part, 0)) for stage in plan.stages))
    for name, found in plan.ranges.items():
        table.add_row(f"{name} ({found.basis})", *[_between(found.low, found.high)] * columns)
    kv = zip(plan.low.kv_bytes, plan.high.kv_bytes, strict=True)
    table.add_row("left for the KV cache", *(_between(low, high) for low, high in kv))
    return table


def _between(low: float, high: float) -> str:
    return gib(low) if low == high else f"{gib(low)} to {gib(high)}"


def _blocks(plan: Plan) -> RenderableType:
    from rich.table import Table

    table = Table(
        title=f"KV cache ({plan.deployment.kv_dtype}), blocks of {plan.block_size} tokens", title_justify="left"
    )
    for head in ("", "at worst", "at best"):
        table.add_column(head, justify="right" if head else "left")
    for name, low, high in zip(_ROWS, _cells(plan.low), _cells(plan.high), strict=True):
        table.add_row(name, low, high)
    length = f"sequences of {plan.max_model_len:,} tokens a DP rank"
    table.add_row(length, f"{plan.low.concurrency:,.2f}", f"{plan.high.concurrency:,.2f}")
    return table


_ROWS = ("blocks a DP rank", "blocks that an EP rank sees", "tokens a DP rank", "tokens of all DP ranks")


def _cells(outcome: Outcome) -> list[str]:
    budget = outcome.budget
    if budget is None:
        return ["does not fit"] * len(_ROWS)
    counts = (budget.per_dp_blocks, budget.per_ep_view_blocks, budget.per_dp_tokens)
    return [f"{count:,}" for count in (*counts, budget.num_blocks_global * budget.block_size)]


def _notes(plan: Plan) -> str:
    notes = [f"{name}: {found.why} ({found.basis})" for name, found in plan.ranges.items()]
    if plan.deployment.block_size is None:
        notes.append(f"block size {plan.block_size} (assumed: the attention backend decides)")
    per_token = ", ".join(f"{stage.token_bytes:,}" for stage in plan.stages)
    notes.append(f"KV bytes a token on a device: {per_token}")
    if plan.checked_with:
        notes.append(f"blocks computed by vLLM {plan.checked_with}, too: the same")
    else:
        notes.append("blocks computed by the pure model alone")
    return "\n".join(notes)
