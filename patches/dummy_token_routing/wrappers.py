"""The three ways in which releases can be had to draw the token ids of a profile run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["VARIABLE", "by_argument", "by_own_draw", "by_variable", "wanted"]

VARIABLE = "VLLM_RANDOMIZE_DP_DUMMY_INPUTS"


def wanted(parallel: Any) -> bool:
    """Whether the profile run is to draw its token ids, read from a ``ParallelConfig``.

    The operator's own VLLM_RANDOMIZE_DP_DUMMY_INPUTS decides where it is set, in the V2 runners that ignore it, too.
    """
    spread = parallel.data_parallel_size > 1 and parallel.enable_expert_parallel
    return spread and os.environ.get(VARIABLE, "1") == "1"


def by_argument(seam: Seam) -> Callable[..., None]:
    """From 0.31 on both runners take ``randomize_inputs``."""
    original = seam.original

    @wraps(original)
    def profile_run(self: Any, randomize_inputs: bool = False) -> None:
        seam.count()
        original(self, randomize_inputs=randomize_inputs or wanted(self.vllm_config.parallel_config))

    return profile_run


def by_variable(seam: Seam) -> Callable[..., None]:
    """Up to 0.30 the V1 runner reads the variable in every dummy run; it is on for the profile run only.

    So idle data-parallel ranks keep stock's dummy batches and do not draw ids in each step.
    """
    return _within(seam, lambda _: _variable_on())


def by_own_draw(seam: Seam) -> Callable[..., None]:
    """From 0.24 to 0.30 the V2 runner always takes zeros; the ids are drawn when the batch goes to the model.

    The dummy batch is made deep in ``execute_model``; ``prepare_inputs`` of the model's state is what sees it last.
    """
    return _within(seam, _drawing)


def _within(seam: Seam, scope: Callable[[Any], AbstractContextManager[None]]) -> Callable[..., None]:
    original = seam.original

    @wraps(original)
    def profile_run(self: Any) -> None:
        seam.count()
        with scope(self) if wanted(self.vllm_config.parallel_config) else nullcontext():
            original(self)

    return profile_run


@contextmanager
def _variable_on() -> Iterator[None]:
    """Set the name in vLLM's module: workers have cached what the environment says."""
    from vllm import envs

    before = dict(vars(envs))
    setattr(envs, VARIABLE, True)
    try:
        yield
    finally:
        if VARIABLE in before:
            setattr(envs, VARIABLE, before[VARIABLE])
        else:
            delattr(envs, VARIABLE)


@contextmanager
def _drawing(runner: Any) -> Iterator[None]:
    """Draw from a generator of its own: unseeded requests sample from torch's, which stays as stock leaves it."""
    import torch

    state, prepare = runner.model_state, runner.model_state.prepare_inputs
    generator = torch.Generator(runner.device)
    generator.manual_seed(runner.vllm_config.parallel_config.data_parallel_rank)

    def prepare_inputs(batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch.input_ids.random_(0, runner.vocab_size, generator=generator)
        return prepare(batch, *args, **kwargs)

    state.prepare_inputs = prepare_inputs
    try:
        yield
    finally:
        del state.prepare_inputs
