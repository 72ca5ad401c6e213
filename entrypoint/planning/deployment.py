"""What ``splint plan`` is asked for, with vLLM's names for the flags."""

from __future__ import annotations

import os
from dataclasses import dataclass

from entrypoint.planning.shape import LatentAttention, ModelShape
from entrypoint.planning.sizes import GIB, MOST
from patches.framework.errors import PlanError
from patches.framework.libraries import in_range, installed_version

__all__ = ["Deployment"]

_UTILISATION = 0.92
_UTILISATION_BEFORE_0_22 = 0.9
_BLOCK, _LATENT_BLOCK = 16, 64
_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


@dataclass(frozen=True)
class Deployment:
    """A model, a kind of device, and the flags that decide about memory. Sizes are in bytes.

    Attributes:
        device_memory: Of one device.
        dtype: The model's, or ``auto``.
        utilisation: ``--gpu-memory-utilization``, or None: the release's default.
        max_model_len: Tokens, or None: the model's own.
        block_size: Tokens a block, or None: what attention backends usually take.
        kv_memory: ``--kv-cache-memory-bytes``, or None.
        blocks_override: ``--num-gpu-blocks-override``, or None.
        batched_tokens: ``--max-num-batched-tokens``, or None: a range.
        sequences: ``--max-num-seqs``, or None: a range.
        weights: Measured weights of one device, or None: computed.
        activation: Measured activations, or None: a range.
        graphs: Measured CUDA graphs, or None: a range.
        other: Measured rest (context, communication), or None: a range.
    """

    device_memory: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    dtype: str = "auto"
    kv_dtype: str = "auto"
    utilisation: float | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    kv_memory: int | None = None
    blocks_override: int | None = None
    batched_tokens: int | None = None
    sequences: int | None = None
    eager: bool = False
    weights: int | None = None
    activation: int | None = None
    graphs: int | None = None
    other: int | None = None

    def __post_init__(self) -> None:
        if self.utilisation is not None and not 0 < self.utilisation <= 1:
            raise PlanError(f"--gpu-memory-utilization {self.utilisation}", "a part, over 0 and up to 1", "Correct it.")
        if self.device_memory < GIB:
            raise PlanError(
                f"a device of {self.device_memory} bytes", "at least 1GiB", "Name its memory with the unit."
            )
        for name in ("max_model_len", "block_size", "kv_memory", "blocks_override", "batched_tokens", "sequences"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST:
                raise PlanError(f"{name} {str(value)[:40]}", f"a number from 1 to {MOST}", "Correct the flag.")
        if self.sequences and self.batched_tokens and self.sequences > self.batched_tokens:
            raise PlanError(
                f"--max-num-batched-tokens {self.batched_tokens} with --max-num-seqs {self.sequences}",
                "a token for each sequence, as vLLM demands it",
                "Correct one of them.",
            )
        if self.block_size is not None and self.block_size % _BLOCK:
            raise PlanError(
                f"--block-size {self.block_size}",
                f"a multiple of {_BLOCK}, as vLLM's attention backends for GPUs demand it",
                "Correct the flag.",
            )

    @property
    def part(self) -> float:
        """The part of the device's memory that vLLM takes."""
        if self.utilisation is not None:
            return self.utilisation
        release = installed_version("vllm")
        old = release is not None and in_range(release, "<0.22")
        return _UTILISATION_BEFORE_0_22 if old else _UTILISATION

    def length(self, shape: ModelShape) -> int:
        """Tokens of the longest sequence.

        Raises:
            PlanError: neither the flag nor the configuration says it, or the flag asks for more than vLLM accepts.
        """
        if self.max_model_len and shape.limit and self.max_model_len > shape.limit and not _longer_allowed():
            raise PlanError(
                f"--max-model-len of {self.max_model_len} tokens for a model of {shape.limit} tokens",
                "at most the model's own length",
                f"Lower it, or set {_LONGER}=1 for plan and server alike.",
            )
        longest = self.max_model_len or shape.max_len
        if longest is None:
            raise PlanError(
                "a configuration whose scaling of positions is not a known one",
                "the longest sequence",
                "Give --max-model-len.",
            )
        return longest

    def block(self, shape: ModelShape) -> int:
        """Tokens a block."""
        return self.block_size or (_LATENT_BLOCK if isinstance(shape.attention, LatentAttention) else _BLOCK)


def _longer_allowed() -> bool:
    return os.environ.get(_LONGER, "0").strip().lower() in ("1", "true")
