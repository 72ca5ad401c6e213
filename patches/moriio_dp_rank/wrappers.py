"""The prefill rank of a READ is known in time; where it is not rank 0, these releases have no right read for it."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from patches.framework import process
from patches.framework.errors import EnvironmentRefusedError, RefusedError
from patches.framework.records import Seam

__all__ = ["connector", "matched_tokens", "reads_wrong_rank"]

logger = logging.getLogger(__name__)
_REMEDY = (
    "Use vLLM 0.27 or later, or WRITE mode (read_mode in kv_connector_extra_config; in the oldest releases"
    " VLLM_MORIIO_CONNECTOR_READ_MODE), or prefill with tensor parallelism instead of data parallelism."
)
_told: set[str] = set()


def connector(seam: Seam) -> Callable[..., None]:
    """Refuse a data-parallel prefill side in READ mode, before a byte of memory is registered.

    Dense models are not concerned: their DP ranks are engines of their own, each with ``data_parallel_size`` 1.
    """
    original = seam.original

    @wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        ranks: int = vllm_config.parallel_config.data_parallel_size
        transfer = vllm_config.kv_transfer_config
        if ranks > 1 and transfer.is_kv_producer and _reads(sys.modules[original.__module__], transfer):
            process.refuse(_refusal(ranks, transfer.kv_role))
        original(self, vllm_config, *args, **kwargs)

    return init


def _reads(module: Any, transfer: Any) -> bool:
    """Whether the connector works in READ mode, as the release itself decides it."""
    mode = module.get_moriio_mode
    return (mode(transfer) if inspect.signature(mode).parameters else mode()) is module.MoRIIOMode.READ


def _refusal(ranks: int, role: str) -> RefusedError:
    return EnvironmentRefusedError(
        f"MoRIIO in READ mode with {role} and data_parallel_size {ranks}: decode engines read rank 0's memory only,"
        f" so the prompts of {ranks - 1} of {ranks} ranks would come with foreign KV",
        "data_parallel_size 1 on the prefill side of READ mode",
        _REMEDY,
    )


def matched_tokens(seam: Seam) -> Callable[..., tuple[int, bool]]:
    """A load that would read the wrong rank becomes a miss: the decode engine computes the prompt itself.

    ``do_remote_prefill`` goes off with it, so that none of the later steps (allocation, end, abort) plans the read.
    The answer stays the same when the scheduler asks again, as it does after a preemption.
    """
    original = seam.original

    @wraps(original)
    def matched(self: Any, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        seam.count()
        params = request.kv_transfer_params
        if params and not self.is_producer and self.mode.name == "READ" and reads_wrong_rank(params):
            params["do_remote_prefill"] = False
            _tell(params)
            return 0, False
        found: tuple[int, bool] = original(self, request, num_computed_tokens)
        return found

    return matched


def reads_wrong_rank(params: Mapping[str, Any]) -> bool:
    """Whether the KV of these transfer parameters lies, or may lie, on another prefill rank than 0."""
    rank = params.get("remote_dp_rank")
    return int(params.get("remote_dp_size") or 1) > 1 if rank is None else int(rank) != 0


def _tell(params: Mapping[str, Any]) -> None:
    rank, ranks = params.get("remote_dp_rank", "unknown"), params.get("remote_dp_size", "unknown")
    reason = f"prefill rank {rank} of {ranks}"
    if reason not in _told:
        _told.add(reason)
        logger.warning(
            "KV of %s is not loaded: this release's MoRIIO READ reaches rank 0 only. Such prompts are recomputed. %s",
            reason,
            _REMEDY,
        )
