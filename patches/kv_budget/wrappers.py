"""Where the agreement meets the engine core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from patches.framework import process, settings
from patches.framework.errors import BudgetError
from patches.framework.records import Seam
from patches.kv_budget import engine, shares
from patches.kv_budget.agreement import Agreement, own_row
from patches.kv_budget.budget import RankBlocks
from patches.kv_budget.channel import Channel
from patches.kv_budget.lifeline import Lifeline, address_towards
from patches.kv_budget.watching import Watch, end_workers, stop_engine

__all__ = ["engine_core", "get_kv_cache_configs", "init_data_parallel", "initialize_kv_caches"]

logger = logging.getLogger("vllm.splint.kv_budget")

_MEMBER = "splint_kv_budget"


class Member:
    """A DP rank's part in the group: its agreement, and its watch over the others."""

    def __init__(self, vllm_config: Any, store: Any) -> None:
        parallel = vllm_config.parallel_config
        channel = Channel(store, parallel.data_parallel_rank, parallel.data_parallel_size)
        self.lifeline = Lifeline(address_towards(parallel.data_parallel_master_ip))
        self.own = engine.hello(vllm_config, self.lifeline.place)
        self.watch = Watch(channel, self.own, stop_engine, self.lifeline.close)
        self.agreement = Agreement(
            channel,
            policy=settings.get("SPLINT_KV_BUDGET"),
            ep_size=engine.ep_size(parallel),
            timeout_s=settings.get("SPLINT_KV_BUDGET_TIMEOUT_S"),
        )

    def join(self) -> None:
        """Meet the other ranks, then watch them. Raises BudgetError."""
        self.agreement.hello(self.own)
        self.watch.start(self.agreement.watched())


_planning: ContextVar[Member | None] = ContextVar("splint_kv_budget", default=None)


def init_data_parallel(seam: Seam) -> Callable[..., Any]:
    """The group's store exists from here on, and no worker does yet."""
    original = seam.original

    @wraps(original)
    def connected(self: Any, vllm_config: Any) -> None:
        seam.count()
        original(self, vllm_config)
        if engine.not_applicable(vllm_config, in_group=True) is None:
            _refusing(lambda: _join(self, vllm_config))

    return connected


def _join(core: Any, vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    member = Member(vllm_config, core.dp_store)
    setattr(core, _MEMBER, member)
    member.join()
    try:
        share = shares.share_of(parallel.data_parallel_rank, parallel.data_parallel_size)
    except BudgetError as error:
        member.watch.failed(str(error))
        raise
    shares.apply(share, vllm_config.cache_config)


def _refusing(step: Callable[[], Any]) -> Any:
    """Refuse to serve where the ranks can't agree; None where the mode only reports."""
    try:
        return step()
    except BudgetError as error:
        process.start().refuse(error)
        return None


def engine_core(seam: Seam) -> Callable[..., Any]:
    """A rank that can't start says why before it goes. What was refused was refused by all of them."""
    original = seam.original

    @wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        try:
            original(self, *args, **kwargs)
        except BudgetError:
            raise
        except Exception as error:
            if (member := getattr(self, _MEMBER, None)) is not None:
                member.watch.failed(_first_line(error))
                end_workers()
            raise
        if (member := getattr(self, _MEMBER, None)) is not None:
            member.watch.up()

    return start


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(". ")


def initialize_kv_caches(seam: Seam) -> Callable[..., Any]:
    """From profiling to warm-up: what is planned in here is planned with the others."""
    original = seam.original

    @wraps(original)
    def initialize(self: Any, vllm_config: Any) -> Any:
        seam.count()
        member: Member | None = getattr(self, _MEMBER, None)
        if member is None:
            planned = original(self, vllm_config)
            _note_alone(vllm_config, planned.num_blocks)
            return planned
        member.watch.stage = "measuring its memory"
        token = _planning.set(member)
        try:
            planned = original(self, vllm_config)
        finally:
            _planning.reset(token)
        _tell_new_ranks(self, member)
        return planned

    return initialize


def _note_alone(vllm_config: Any, num_blocks: int) -> None:
    reason = engine.not_applicable(vllm_config, in_group=False)
    logger.info("KV budget: not applicable: %s", reason)
    dp_rank = vllm_config.parallel_config.data_parallel_index
    block_size, max_model_len = vllm_config.cache_config.block_size, vllm_config.model_config.max_model_len
    own = own_row(RankBlocks(dp_rank, 0, num_blocks, block_size), max_model_len)
    process.start().note(kv_budget={"applies": False, "reason": reason, "own": [own]})


def _tell_new_ranks(core: Any, member: Member) -> None:
    """What elastic EP hands to every worker of a new rank: stock notes the first worker's bytes for all of them.

    Where each rank keeps its own budget (``report``, or a refusal that the mode only reports) stock's value stays.
    """
    decision = member.agreement.decision
    if decision is not None and decision.budget is not None:
        core.available_gpu_memory_for_kv_cache = max(process.start().facts["kv_budget"]["memory"])


def get_kv_cache_configs(seam: Seam) -> Callable[..., Any]:
    """Between the measure and the plan: nothing is allocated before every rank plans the same."""
    original = seam.original

    @wraps(original)
    def plan(vllm_config: Any, kv_cache_specs: list[dict[str, Any]], available_memory: list[int], *more: Any) -> Any:
        seam.count()
        member = _planning.get()
        if member is None or not any(kv_cache_specs):
            return original(vllm_config, kv_cache_specs, available_memory, *more)
        own = engine.measure(vllm_config, kv_cache_specs, available_memory, *more)
        member.watch.stage = "planning its KV cache"
        memory = _refusing(lambda: member.agreement.measured(own)) or available_memory
        configs = original(vllm_config, kv_cache_specs, memory, *more)
        blocks = RankBlocks(own.dp_rank, 0, configs[0].num_blocks, own.block_size)
        max_model_len = vllm_config.model_config.max_model_len
        _refusing(lambda: member.agreement.planned(blocks, max_model_len))
        member.watch.stage = "allocating its KV cache and warming up"
        _note(member, own.memory, memory, blocks, max_model_len)
        return configs

    return plan


def _note(member: Member, measured: tuple[int, ...], memory: list[int], blocks: RankBlocks, max_model_len: int) -> None:
    """What this rank says about its budget; DP0 also says what it knows of all."""
    own = {**own_row(blocks, max_model_len), "measured_bytes": list(measured)}
    process.start().note(
        kv_budget={
            "applies": True,
            "policy": member.agreement.policy,
            "memory": list(memory),
            "own": [own],
            "ranks": member.agreement.rows,
        }
    )
