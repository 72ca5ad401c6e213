"""A real model runner of one release on CPU, in two real data-parallel ranks, and where its dummy runs send tokens.

Runs in an interpreter of its own (:mod:`support.releases`), which has that release's Python sources but none of its
compiled parts. So the model is a small one of this module's own, an embedding and a gate, and ``_moe_C::topk_softmax``
is written out in torch; the dummy sampler run is left out, which needs Triton or compiled parts. Runner, dummy batches,
forward context, router, groups and the placement of experts are the release's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import nn

from support.tiny_config import EXPERTS, HIDDEN, REQUEST_TOKENS, VOCABULARY, tiny_config

__all__ = ["RANKS", "TOKENS", "main"]

TOKENS = 512
"""Tokens of the largest batch, which the profile run has."""
RANKS = 2

_library = torch.library.Library("_moe_C", "FRAGMENT")
_library.define(
    "topk_softmax(Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) indices, Tensor gating, bool renormalize,"
    " Tensor? bias=None, Tensor? is_padding=None) -> ()"
)


def _topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    _indices: torch.Tensor,
    gating: torch.Tensor,
    renormalize: bool,
    _bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    """The kernel's contract: the best experts of each token, and expert -1 for a token that is padding."""
    best, chosen = gating.softmax(-1).topk(ids.shape[1])
    weights.copy_(best / best.sum(-1, keepdim=True) if renormalize else best)
    ids.copy_(chosen)
    if is_padding is not None:
        ids[is_padding] = -1


_library.impl("topk_softmax", _topk_softmax, "CPU")


class Forward(NamedTuple):
    """One forward pass: token ids, expert ids of shape (tokens, 1), and which tokens the runner called padding."""

    tokens: torch.Tensor
    experts: torch.Tensor
    padding: torch.Tensor

    def told(self) -> dict[str, Any]:
        """What a test asks about it, ready for JSON."""
        return {
            "padding": int(self.padding.sum()),
            "routed": int((self.experts >= 0).sum()),
            "distinct": self.tokens.unique().numel(),
            "shares": _rank_shares(self.experts),
        }


class Gated(nn.Module):  # type: ignore[misc]
    """Embedding and gate of a mixture-of-experts model; ``seen`` keeps what went through, a pass at a time."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: ARG002  (vLLM asks for both)
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.seen: list[Forward] = []

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding(input_ids)
        return embedded

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        from vllm.forward_context import get_forward_context
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

        hidden = self.embed_input_ids(input_ids)
        experts = fused_topk(hidden, self.gate(hidden), 1, renormalize=True)[1]
        padding = getattr(get_forward_context(), "is_padding", None)
        none = torch.zeros(len(input_ids), dtype=torch.bool)
        self.seen.append(Forward(input_ids.clone(), experts, none if padding is None else padding.clone()))
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embedding.weight.T


def _rank_shares(experts: torch.Tensor) -> list[float]:
    """The share of the tokens that each expert-parallel rank computes."""
    try:
        from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
    except ImportError:  # up to 0.21
        from vllm.model_executor.layers.fused_moe.layer import determine_expert_map

    local = [determine_expert_map(RANKS, rank, EXPERTS)[1] for rank in range(RANKS)]
    return [float(((held[experts.long()] >= 0) & (experts >= 0)).float().mean()) for held in local]


def _config(*, expert_parallel: bool) -> Any:
    """Two data-parallel ranks of :class:`Gated`."""
    return tiny_config(
        Gated,
        max_num_seqs=TOKENS // REQUEST_TOKENS,
        max_num_batched_tokens=TOKENS,
        data_parallel_size=RANKS,
        data_parallel_rank=0,
        data_parallel_address="127.0.0.1",
        enable_expert_parallel=expert_parallel,
    )


def _runner_v1(config: Any) -> Any:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner = CPUModelRunner(config, torch.device("cpu"))
    runner.load_model()
    runner._dummy_sampler_run = lambda _: None
    return runner


class _Nothing:
    """A stream or event of no device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _UvaBuffer:
    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()
        self.uva = self.gpu = self.cpu


def _stand_in_for_cuda() -> None:
    torch.cuda.Stream = torch.cuda.Event = torch.Event = _Nothing
    torch.cuda.current_stream = _Nothing
    from vllm.v1.worker.gpu import buffer_utils

    buffer_utils.UvaBuffer = _UvaBuffer


def _runner_v2(config: Any) -> Any:
    try:
        import vllm.v1.worker.cpu.shm  # noqa: F401  (the release's own stand-ins for torch.cuda, since 0.25)
    except ImportError:
        _stand_in_for_cuda()
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = GPUModelRunner(config, torch.device("cpu"))
    runner.load_model()
    runner.initialize_kv_cache(KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]))
    runner._dummy_sampler_run = lambda _: None
    return runner


def _profile(config: Any) -> dict[str, Any]:
    from vllm import envs

    runner = _runner_v1(config)
    envs.enable_envs_cache()  # as WorkerProc does before anybody asks for a profile run
    runner.profile_run()
    return {"profile": runner.model.seen[-1].told(), "left": "VLLM_RANDOMIZE_DP_DUMMY_INPUTS" in vars(envs)}


def _dummy_runs(config: Any) -> dict[str, Any]:
    runner = _runner_v2(config)
    random = torch.random.get_rng_state()
    found = {}
    runs: dict[str, Callable[[], Any]] = {
        "profile": runner.profile_run,
        "idle": lambda: runner._dummy_run(1, uniform_decode=True),
        "warm_up": lambda: runner._dummy_run(TOKENS),
    }
    for name, run in runs.items():
        run()
        found[name] = runner.model.seen[-1].told()
    return {**found, "same_random": bool(torch.equal(random, torch.random.get_rng_state()))}


_LOOKS = {"V1": _profile, "V2": _dummy_runs}


def _in_ranks(config: Any, look: Callable[[Any], Any]) -> list[Any]:
    """What ``look(config)`` returns in each data-parallel rank, processes of their own with gloo groups."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [
        context.Process(target=_rank, args=(config, rank, look, theirs)) for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    found = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    return found


def _rank(config: Any, rank: int, look: Callable[[Any], Any], answer: Connection) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config.parallel_config.data_parallel_rank = rank
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        answer.send(look(config) | {"states": _states()})


def _states() -> dict[str, str]:
    from patches.framework import process

    current = process.current()
    return {} if current is None else {name: found.state.value for name, found in current.application.states.items()}


def main(runner: str, *, expert_parallel: bool = True) -> None:
    """Print what each rank's dummy runs did, as one line of JSON: a list with an entry for each rank."""
    found = _in_ranks(_config(expert_parallel=expert_parallel), _LOOKS[runner])
    sys.stdout.write(json.dumps(found) + "\n")
