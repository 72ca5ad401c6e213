"""A deployment's memory, device by device: weights, KV cache, the rest, and the blocks that come out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from entrypoint.planning import architectures, assumptions, engine
from entrypoint.planning.assumptions import Range
from entrypoint.planning.cache import LayerCache, dtype_bytes, layer_caches
from entrypoint.planning.deployment import Deployment
from entrypoint.planning.shape import ModelShape
from entrypoint.planning.sizes import gib
from entrypoint.planning.split import Split
from entrypoint.planning.weights import stage_weights
from patches.framework.errors import PlanError
from patches.kv_budget.budget import KVCacheBudget

__all__ = ["Outcome", "Plan", "Stage", "make"]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, as its device with most weights has it.

    Attributes:
        layers: Its layers.
        weights: Bytes by part.
        caches: The caches of its layers.
    """

    layers: range
    weights: dict[str, int]
    caches: list[LayerCache]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.weights.values())

    @property
    def token_bytes(self) -> int:
        """KV bytes a token on this device."""
        return sum(cache.token_bytes for cache in self.caches)


@dataclass(frozen=True)
class Outcome:
    """What comes out at one end of the assumptions.

    Attributes:
        kv_bytes: For the KV cache on a device of each stage.
        budget: The blocks, or None where not even one sequence of full length fits.
        concurrency: Sequences of full length that one DP rank holds.
    """

    kv_bytes: tuple[int, ...]
    budget: KVCacheBudget | None
    concurrency: float


class Plan:
    """Everything that is told about a deployment.

    Raises:
        PlanError: something is not known, does not divide, or vLLM and the pure model disagree.
    """

    def __init__(self, shape: ModelShape, deployment: Deployment, *, with_vllm: bool) -> None:
        self.shape, self.deployment = shape, deployment
        moe = shape.experts is not None
        if deployment.expert_parallel and not moe:
            raise PlanError(
                f"--enable-expert-parallel for {shape.architecture}", "a model with experts", "Leave it out."
            )
        self.split = Split(deployment.tp, deployment.pp, deployment.dp, deployment.expert_parallel, moe)
        self.dtype = shape.dtype if deployment.dtype == "auto" else deployment.dtype
        self.max_model_len = deployment.length(shape)
        self.block_size = deployment.block(shape)
        self.stages = [self._stage(layers) for layers in self.split.stages(shape.layers)]
        self.checked_with = engine.release() if with_vllm else None

    def _stage(self, layers: range) -> Stage:
        size = dtype_bytes(self.dtype)
        measured = self.deployment.weights
        weights = (
            {"as measured": measured} if measured is not None else stage_weights(self.shape, self.split, layers, size)
        )
        return Stage(
            layers, weights, layer_caches(self.shape, self.split, layers, self.dtype, self.deployment.kv_dtype)
        )

    @property
    def requested(self) -> int:
        """Bytes that vLLM takes of a device."""
        return int(self.deployment.device_memory * self.deployment.part)

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """What a start measures."""
        wanted = self.deployment
        step = assumptions.batch(wanted.device_memory, wanted.batched_tokens, wanted.sequences)
        made = {
            "activations": assumptions.activation(self.shape, self.split, step, dtype_bytes(self.dtype)),
            "CUDA graphs": assumptions.graphs(eager=wanted.eager),
            "context, communication": assumptions.other(self.split),
        }
        measured = zip(made, (wanted.activation, wanted.graphs, wanted.other), _FLAGS, strict=True)
        return made | {name: Range.given(size, flag) for name, size, flag in measured if size is not None}

    @cached_property
    def low(self) -> Outcome:
        """The outcome where everything assumed is at its high end."""
        return self._outcome(sum(found.high for found in self.ranges.values()))

    @cached_property
    def high(self) -> Outcome:
        """The outcome where everything assumed is at its low end."""
        return self._outcome(self._least)

    def _outcome(self, rest: int) -> Outcome:
        given = self.deployment.kv_memory
        memory = [given or self.requested - stage.weight_bytes - rest for stage in self.stages]
        blocks = self.blocks(memory)
        needed = -(-self.max_model_len // self.block_size)
        if blocks - 1 < needed:  # one block is the pool's null block
            return Outcome(tuple(memory), None, 0.0)
        if self.checked_with is not None:
            self._check(memory, blocks, blocks / needed)
        budget = KVCacheBudget(blocks * self.split.dp, self.split.dp, self.split.ep, self.block_size)
        return Outcome(tuple(memory), budget, blocks / needed)

    def blocks(self, memory: list[int]) -> int:
        """Blocks of one DP rank: what the stage with least room holds, whole blocks only.

        Args:
            memory: Bytes for the KV cache on a device of each stage.
        """
        if self.deployment.blocks_override is not None:
            return self.deployment.blocks_override
        per_stage = zip(memory, self.stages, strict=True)
        return max(0, min(size // (stage.token_bytes * self.block_size) for size, stage in per_stage))

    def _check(self, memory: list[int], blocks: int, concurrency: float) -> None:
        """Hold the pure model against vLLM's own code.

        Raises:
            PlanError: they differ.
        """
        found = engine.blocks(
            [stage.caches for stage in self.stages],
            memory,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            override=self.deployment.blocks_override,
        )
        if found != (blocks, concurrency):
            raise PlanError(
                f"vLLM {self.checked_with} makes {found[0]} blocks ({found[1]:.2f} sequences) of {memory} bytes,"
                f" the pure model {blocks} ({concurrency:.2f})",
                "the same",
                "Report this; --without-vllm plans with the pure model alone.",
            )

    def refuse_what_does_not_fit(self) -> None:
        """Raises PlanError where even the best case has no room for one sequence, or for what the flags demand."""
        room = [self.requested - stage.weight_bytes - self._least for stage in self.stages]
        tightest = min(range(len(room)), key=lambda index: room[index] / self.stages[index].token_bytes)
        needed, what = self._needed(self.stages[tightest])
        if needed > room[tightest] or self.high.budget is None:
            raise PlanError(
                f"at best {gib(room[tightest])} GiB are left for the KV cache of a device"
                f" ({gib(self.stages[tightest].weight_bytes)} GiB of weights, {gib(self.requested)} GiB taken)",
                f"{gib(needed)} GiB, for {what}",
                "Use more or larger devices, lower --max-model-len, or a smaller --kv-cache-dtype.",
            )

    @property
    def _least(self) -> int:
        return sum(found.low for found in self.ranges.values())

    def _needed(self, stage: Stage) -> tuple[int, str]:
        """Bytes that a device must have for the KV cache, and what for."""
        wanted, block = self.deployment, self.block_size * stage.token_bytes
        one = (-(-self.max_model_len // self.block_size) + 1) * block
        demanded = [(one, f"one sequence of {self.max_model_len} tokens")]
        if wanted.blocks_override is not None:
            demanded.append((wanted.blocks_override * block, f"--num-gpu-blocks-override {wanted.blocks_override}"))
        if wanted.kv_memory is not None:
            demanded.append((wanted.kv_memory, "--kv-cache-memory-bytes"))
        return max(demanded)


_FLAGS = ("--activation-memory", "--graph-memory", "--other-memory")


def make(model: str, deployment: Deployment, scheme: str | None = None, *, with_vllm: bool = True) -> Plan:
    """Plan the model in a folder.

    Args:
        model: Its folder, or its name where it is in the hub's local cache.
        deployment: What is asked for.
        scheme: ``--quantization``, or None.
        with_vllm: Whether blocks are computed with the installed vLLM's code, too.

    Raises:
        PlanError: something is not known, does not divide, or does not fit.
    """
    shape = architectures.read(model, scheme, weigh=deployment.weights is None)
    _refuse_what_contradicts_the_checkpoint(shape, deployment)
    made = Plan(shape, deployment, with_vllm=with_vllm)
    made.refuse_what_does_not_fit()
    return made


def _refuse_what_contradicts_the_checkpoint(shape: ModelShape, deployment: Deployment) -> None:
    if shape.declared_kv and deployment.kv_dtype == "auto":
        raise PlanError(
            f"a checkpoint that declares its KV cache to be {shape.declared_kv}, which auto follows",
            "the KV dtype by name",
            "Give --kv-cache-dtype.",
        )
    if shape.kv_scales and deployment.kv_dtype == "fp8_e5m2":
        raise PlanError(
            "--kv-cache-dtype fp8_e5m2 for a checkpoint whose quantisation has KV scales: vLLM does not support it"
            " with fp8 checkpoints",
            "auto, fp8 or fp8_e4m3",
            "Use fp8.",
        )
