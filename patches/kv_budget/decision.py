"""From what all ranks said to one decision. Pure, and linear in ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from patches.framework.errors import BudgetError
from patches.kv_budget.budget import KVCacheBudget
from patches.kv_budget.measurement import Hello, Measurement
from patches.kv_override_check.limits import KVCacheTooLargeError, check_override

__all__ = ["Decision", "compare_hellos", "decide", "describe", "table"]

SAME_OR_NOTHING = (
    "SPLINT_KV_BUDGET",
    "patch_set",
    "vllm",
    "max_model_len",
    "block_size",
    "kv_cache_dtype",
    "num_gpu_blocks_override",
)
SHOWN = 8


@dataclass(frozen=True)
class Decision:
    """What every rank does; one rank makes it, the others read it.

    Attributes:
        policy: ``align``, ``report`` or ``strict``.
        num_blocks_global: Blocks over all DP ranks; 0 where each rank keeps its own (``report``).
        dp_size: Data-parallel size.
        ep_size: Expert-parallel size.
        block_size: Tokens a block.
        bytes_agreed: The least memory of all ranks, worker position by worker position; empty under ``report``. What
            a rank plans with is its agreed blocks in bytes, so that what is left of a block counts nowhere.
    """

    policy: str
    num_blocks_global: int
    dp_size: int
    ep_size: int
    block_size: int
    bytes_agreed: tuple[int, ...] = ()

    def to_json(self) -> str:
        """The decision as it travels."""
        return json.dumps(asdict(self))

    @property
    def budget(self) -> KVCacheBudget | None:
        """The one budget, or None where each rank keeps its own."""
        if not self.num_blocks_global:
            return None
        return KVCacheBudget(self.num_blocks_global, self.dp_size, self.ep_size, self.block_size)

    def memory_for(self, own: Measurement) -> list[int]:
        """Bytes a worker that give this rank exactly the agreed blocks; its own measure where there are none."""
        budget = self.budget
        if budget is None:
            return list(own.memory)
        pairs = zip(own.memory, own.bytes_per_block, strict=True)
        return [budget.per_dp_blocks * each if each else have for have, each in pairs]


def compare_hellos(hellos: Sequence[Hello], policy: str) -> None:
    """Find ranks that can't have one budget, before any of them loads a model.

    Raises:
        BudgetError: a rank differs in what must be the same; under ``strict`` also in what usually is.
    """
    names = [name for name in hellos[0].flags if name in SAME_OR_NOTHING or policy == "strict"]
    _refuse(_differences({hello.name: {name: hello.flags.get(name) for name in names} for hello in hellos}))


def _differences(by_rank: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence for each value that is not the same everywhere, naming the ranks outside the majority."""
    names = dict.fromkeys(name for values in by_rank.values() for name in values)
    problems = []
    for name in names:
        values = {rank: json.dumps(found.get(name)) for rank, found in by_rank.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        others = [f"{value} on {rank}" for rank, value in values.items() if value != usual]
        if others:
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            problems.append(f"{name} is {', '.join(others[:SHOWN])}{more}, {usual} elsewhere")
    return problems


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise BudgetError(
            f"KV budget: the data-parallel ranks differ: {'; '.join(problems)}",
            "the same on every rank",
            "Start every node with the same flags, model, vLLM and vllm-splint.",
        )


def decide(measurements: Sequence[Measurement], *, policy: str, ep_size: int) -> Decision:
    """One budget for all ranks.

    Bytes are compared worker position by worker position (pipeline stages differ on purpose), and the smallest rank's
    whole blocks count, so that what is left of a block never makes ranks differ.

    Args:
        measurements: One a DP rank, in rank order.
        policy: ``align`` gives every rank what the smallest can hold, ``report`` leaves them as they are, ``strict``
            refuses a difference.
        ep_size: Expert-parallel size.

    Raises:
        BudgetError: the ranks can't agree; the message names the rank.
    """
    first = measurements[0]
    if policy == "report":
        return Decision(policy, 0, len(measurements), ep_size, first.block_size)
    _refuse(_differences({found.name: _must_match(found) for found in measurements}))
    _check_memory(measurements)
    blocks = [_blocks(measurement) for measurement in measurements]
    if policy == "strict" and len(set(blocks)) > 1:
        raise BudgetError(describe(measurements), "equal budgets (SPLINT_KV_BUDGET=strict)", _EQUAL)
    least = tuple(min(column) for column in zip(*(found.memory for found in measurements), strict=True))
    smallest = first.blocks_in(least) if first.override is None else first.override
    budget = KVCacheBudget.of_smallest([smallest] * len(blocks), ep_size=ep_size, block_size=first.block_size)
    return Decision(policy, budget.num_blocks_global, budget.dp_size, ep_size, budget.block_size, least)


_EQUAL = "Free the smaller device, give it its own share with SPLINT_KV_BUDGET_RANKS, or use SPLINT_KV_BUDGET=align."


def _must_match(found: Measurement) -> dict[str, Any]:
    return {
        **found.facts,
        "workers": len(found.memory),
        "bytes a block": list(found.bytes_per_block),
        "block_size": found.block_size,
        "num_gpu_blocks_override": found.override,
    }


def _check_memory(measurements: Sequence[Measurement]) -> None:
    for found in measurements:
        for worker, (have, each) in enumerate(zip(found.memory, found.bytes_per_block, strict=True)):
            if each and have < each:
                raise BudgetError(
                    f"KV budget: {found.name} worker {worker} has no available memory for the cache blocks:"
                    f" {have} bytes",
                    f"at least one block of {each} bytes",
                    "Free memory on that device, raise --gpu-memory-utilization, or shorten --max-model-len.",
                )
            if each and found.override is not None:
                _check_override(found.override, each, have, f"{found.name} worker {worker}")


def _check_override(blocks: int, each: int, have: int, name: str) -> None:
    try:
        check_override(blocks, each, have, name)
    except KVCacheTooLargeError as error:
        raise BudgetError(f"KV budget: {error.found}", error.wanted, error.remedy) from error


def _blocks(found: Measurement) -> int:
    return found.blocks if found.override is None else found.override


def describe(measurements: Sequence[Measurement]) -> str:
    """One line on how far the ranks' budgets lie apart, why that may be, and what aligning them costs."""
    smallest = min(measurements, key=_blocks)
    largest = max(measurements, key=_blocks)
    low, high = _blocks(smallest), _blocks(largest)
    if low == high:
        return f"KV budget: all {len(measurements)} DP ranks hold {low} blocks"
    lost = sum((_blocks(found) - low) * found.block_size for found in measurements)
    return (
        f"KV budget: DP ranks disagree: min {low} blocks ({smallest.name}), max {high} ({largest.name}),"
        f" spread {100 * (high - low) / high:.1f} %. Probable cause: {_cause(smallest, largest)}."
        f" One budget for all costs {lost} tokens of cache,"
        f" {(high - low) * largest.block_size} of them on {largest.name}"
    )


def _cause(smallest: Measurement, largest: Measurement) -> str:
    differing = [
        f"{name} {smallest.cause.get(name)!r} against {largest.cause.get(name)!r}"
        for name in smallest.cause
        if smallest.cause.get(name) != largest.cause.get(name)
    ]
    if differing:
        return f"different flags: {', '.join(differing)}"
    if not smallest.cause.get("randomized_dummy_inputs", True):
        return (
            "dummy tokens that all go to the same experts (VLLM_RANDOMIZE_DP_DUMMY_INPUTS=0),"
            f" or another process on {smallest.device} of {smallest.host}"
        )
    return f"another process on {smallest.device} of {smallest.host}, or a smaller device"


def table(measurements: Sequence[Measurement], decision: Decision) -> list[dict[str, Any]]:
    """One row a DP rank, for the log, the report and the metrics."""
    budget = decision.budget
    rows = []
    for found in measurements:
        own = _blocks(found)
        blocks = own if budget is None else budget.per_dp_blocks
        rows.append(
            {
                "dp_rank": found.dp_rank,
                "host": found.host,
                "device": found.device,
                "measured_bytes": list(found.memory),
                "measured_blocks": own,
                "blocks": blocks,
                "tokens": blocks * found.block_size,
                "tokens_given_up": (own - blocks) * found.block_size,
            }
        )
    return rows
