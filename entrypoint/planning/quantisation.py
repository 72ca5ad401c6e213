"""How the weights of linear layers are stored, for the schemes that are known to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patches.framework.errors import PlanError

__all__ = ["NONE", "Quantisation", "brings_kv_scales", "read"]

FLOAT32 = 4
ROUTER = "mlp.gate"


@dataclass(frozen=True)
class Quantisation:
    """A storage scheme of linear layers.

    Attributes:
        name: As messages write it.
        block: Rows and columns of a block that shares one float32 scale, or None: unquantised.
        router: Whether the routers of the experts are stored in it, too, where the architecture allows it.
    """

    name: str
    block: tuple[int, int] | None = None
    router: bool = False

    def size(self, rows: int, columns: int, dtype_bytes: int) -> int:
        """Bytes of a weight of ``rows`` (output) by ``columns`` (input), its scales included."""
        if self.block is None:
            return rows * columns * dtype_bytes
        high, wide = self.block
        return rows * columns + -(-rows // high) * -(-columns // wide) * FLOAT32

    def check(self, what: str, *, output: tuple[int, ...] = (), inputs: int = 0) -> None:
        """Refuse a device's share of a weight that is no whole number of blocks, as vLLM does.

        Args:
            what: The weight, for the message.
            output: Its rows, those of each matrix that was merged into it.
            inputs: Its columns.

        Raises:
            PlanError: one is no multiple of its block.
        """
        if self.block is None:
            return
        high, wide = self.block
        for size, block in (*((size, high) for size in output), (inputs, wide)):
            if size % block:
                raise PlanError(
                    f"a device's share of {what} is {size} wide, which is no multiple of the weights' block of {block}",
                    "a multiple, as vLLM demands it",
                    "Use a smaller tensor-parallel size, or --enable-expert-parallel for experts.",
                )


NONE = Quantisation("none")
# What checkpoints in FP8 list as unquantised is unquantised in vLLM anyway, or it is a router.
_HARMLESS = ("norm", "lm_head", "embed_tokens", "shared_expert_gate", ROUTER)


def _generic(name: str) -> str:
    """``model.layers.3.mlp.gate`` as ``mlp.gate``."""
    _, found, rest = name.partition(".layers.")
    return rest.partition(".")[2] if found else name


def read(config: Mapping[str, Any], flag: str | None) -> Quantisation:
    """The checkpoint's scheme.

    Args:
        config: The model's configuration.
        flag: ``--quantization``, or None.

    Raises:
        PlanError: the scheme is not one of those that are known.
    """
    declared = config.get("quantization_config")
    if not declared:
        if flag is None:
            return NONE
        raise _unknown(f"--quantization {flag} for a checkpoint that is not quantised")
    method = declared.get("quant_method")
    if flag not in (None, method):
        raise PlanError(f"--quantization {flag} for a checkpoint in {method}", "the same", "Leave the flag out.")
    block = declared.get("weight_block_size")
    if method != "fp8" or not block:
        raise _unknown(f"the quantisation {method}" + ("" if block else " without weight_block_size"))
    skipped = {
        _generic(name) for name in declared.get("modules_to_not_convert") or declared.get("ignored_layers") or ()
    }
    other = sorted(name for name in skipped if not name.endswith(_HARMLESS))
    if other:
        raise _unknown(f"FP8 weights with {', '.join(other)} left unquantised")
    return Quantisation(
        f"fp8 in blocks of {block[0]}x{block[1]}", (int(block[0]), int(block[1])), ROUTER not in skipped
    )


def brings_kv_scales(config: Mapping[str, Any]) -> bool:
    """Whether vLLM's attention layers look for KV scales in such a checkpoint, whatever it declares."""
    declared = config.get("quantization_config") or {}
    return str(declared.get("quant_method")).startswith(("fp8", "modelopt"))


def _unknown(found: str) -> PlanError:
    return PlanError(
        found,
        "weights that are not quantised, or FP8 in blocks (quant_method fp8 with weight_block_size)",
        "Give the weights of one device with --weights-memory, as a start of this model prints them.",
    )
