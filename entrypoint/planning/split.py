"""How vLLM spreads a model over devices: tensor, pipeline, data and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from patches.framework.errors import PlanError

__all__ = ["MOST_DP", "Split"]

MOST_DP = 65536
"""vLLM's front end knows an engine by its rank in two bytes."""


@dataclass(frozen=True)
class Split:
    """The sizes of a deployment's groups.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dp: Data-parallel size.
        expert_parallel: Whether experts are spread whole (``--enable-expert-parallel``).
        moe: Whether the model has experts; without them its DP ranks are engines of their own.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    moe: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} size {getattr(self, name)}", "at least 1", "Correct the flag.")
        if self.dp > MOST_DP:
            raise PlanError(f"--data-parallel-size {self.dp}", f"at most {MOST_DP}", "Correct the flag.")

    @property
    def devices(self) -> int:
        """Devices of the whole deployment."""
        return self.tp * self.pp * self.dp

    @property
    def expert_ranks(self) -> int:
        """Devices of one pipeline stage over which one layer's experts lie: those of all DP ranks."""
        return self.tp * self.dp if self.moe else 1

    @property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self.expert_ranks if self.expert_parallel else 1

    @property
    def expert_shards(self) -> int:
        """Into how many pieces each expert is cut; DP counts, too: without EP, its ranks share every expert."""
        return 1 if self.expert_parallel else self.expert_ranks

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are spread over the TP ranks before the experts; shared experts are whole on each then."""
        return self.expert_parallel and self.moe and self.tp > 1 and self.dp > 1

    def local_experts(self, experts: int) -> int:
        """Experts of a layer on the device that has most of them."""
        return -(-experts // self.ep)

    def share(self, size: int, what: str, shards: int | None = None) -> int:
        """``size`` divided over the TP ranks (or ``shards``).

        Raises:
            PlanError: it does not divide.
        """
        shards = self.tp if shards is None else shards
        if size % shards:
            raise PlanError(
                f"{what} {size} does not divide by {shards}",
                "a number that does, as vLLM demands it",
                "Choose another tensor-parallel size.",
            )
        return size // shards

    def kv_heads(self, total: int) -> int:
        """KV heads of one device: a share of them, or a copy where there are fewer than TP ranks.

        Raises:
            PlanError: neither number divides by the other.
        """
        if total < self.tp and self.tp % total == 0:
            return 1
        return self.share(total, "the number of KV heads")

    def stages(self, layers: int) -> tuple[range, ...]:
        """The layers of each pipeline stage: vLLM gives what does not divide to the last stages but one.

        Raises:
            PlanError: there are more stages than layers.
        """
        each, rest = divmod(layers, self.pp)
        if not each:
            raise PlanError(f"{self.pp} pipeline stages for {layers} layers", "at most one a layer", "Use fewer.")
        sizes = [each + (self.pp - 1 - rest <= stage < self.pp - 1) for stage in range(self.pp)]
        ends = [sum(sizes[: stage + 1]) for stage in range(self.pp)]
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))
