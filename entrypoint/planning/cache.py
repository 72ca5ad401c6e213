"""The KV cache of a model's layers: what a token takes in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from entrypoint.planning.shape import GroupedAttention, Indexer, LatentAttention, ModelShape
from entrypoint.planning.split import Split
from patches.framework.errors import PlanError

__all__ = ["KV_DTYPES", "LayerCache", "dtype_bytes", "layer_caches"]

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
DS_MLA = "fp8_ds_mla"
KV_DTYPES = ("auto", *_BYTES, *FP8, DS_MLA)
_DS_MLA_BYTES = 656
"""512 values in FP8, 4 float32 scales, 64 bfloat16 values of the position-dependent part."""
_DS_MLA_SHAPE = (512, 64)
_INDEX_BLOCK = 128
"""Values of the indexer that share one float32 scale."""


@dataclass(frozen=True)
class LayerCache:
    """One cache of one layer.

    Attributes:
        name: Of the layer, as vLLM's workers have it.
        kind: ``full``, ``mla``, ``sparse_mla`` or ``indexer``.
        kv_heads: Heads on one device.
        head_size: Elements of a head; for MLA of the latent vector, for the indexer bytes.
        dtype: Name of the stored elements' dtype: ``bfloat16``, ``uint8``, …
        cache_dtype: vLLM's string for the layout.
        token_bytes: Bytes a token.
    """

    name: str
    kind: str
    kv_heads: int
    head_size: int
    dtype: str
    cache_dtype: str
    token_bytes: int


def dtype_bytes(name: str) -> int:
    """Bytes of an element of an unquantised dtype.

    Raises:
        PlanError: another dtype.
    """
    if name not in _BYTES:
        raise PlanError(f"dtype {name}", f"one of {', '.join(_BYTES)}", "Name it with --dtype.")
    return _BYTES[name]


def layer_caches(shape: ModelShape, split: Split, layers: range, dtype: str, kv_dtype: str) -> list[LayerCache]:
    """The caches of a pipeline stage's layers on one device.

    Args:
        shape: The model.
        split: The groups.
        layers: The stage's layers.
        dtype: The model's.
        kv_dtype: ``--kv-cache-dtype``.

    Raises:
        PlanError: the attention has no such KV dtype.
    """
    if kv_dtype not in KV_DTYPES:
        raise PlanError(f"--kv-cache-dtype {kv_dtype}", f"one of {', '.join(KV_DTYPES)}", "Choose one of them.")
    if kv_dtype in _BYTES and kv_dtype != dtype:
        raise PlanError(
            f"--kv-cache-dtype {kv_dtype} for a model in {dtype}",
            "the model's own dtype, or a quantised one",
            "Use auto: vLLM would read one's bits as the other's.",
        )
    names = [f"model.layers.{layer}.self_attn" for layer in layers]
    if isinstance(shape.attention, LatentAttention):
        return [cache for name in names for cache in _latent(shape, shape.attention, name, dtype, kv_dtype)]
    if kv_dtype == DS_MLA:
        raise PlanError(f"--kv-cache-dtype {DS_MLA} for {shape.architecture}", "latent attention", "Use fp8.")
    return [_grouped(shape.attention, split, name, dtype, kv_dtype) for name in names]


def _stored(dtype: str, kv_dtype: str) -> tuple[str, int]:
    """Name and bytes of an element as it is stored."""
    return ("uint8", 1) if kv_dtype in FP8 else (dtype, dtype_bytes(dtype))


def _grouped(attention: GroupedAttention, split: Split, layer: str, dtype: str, kv_dtype: str) -> LayerCache:
    name, size = _stored(dtype, kv_dtype)
    heads, width = split.kv_heads(attention.kv_heads), attention.head_dim
    return LayerCache(f"{layer}.attn", "full", heads, width, name, kv_dtype, 2 * heads * width * size)


def _latent(
    shape: ModelShape, attention: LatentAttention, layer: str, dtype: str, kv_dtype: str
) -> Iterator[LayerCache]:
    if kv_dtype == "fp8_e5m2":
        raise PlanError(f"--kv-cache-dtype {kv_dtype} for {shape.architecture}", "auto, fp8 or fp8_e4m3", "Use fp8.")
    if attention.indexer and kv_dtype in FP8:
        raise PlanError(
            f"--kv-cache-dtype {kv_dtype} for sparse attention, whose bytes depend on the attention backend",
            f"auto, or {DS_MLA} (FlashMLA sparse, {_DS_MLA_BYTES} bytes a token)",
            "Name the layout.",
        )
    width = attention.kv_lora_rank + attention.rope_dim
    if kv_dtype == DS_MLA:
        _check_ds_mla(shape, attention)
        name, token_bytes = "uint8", _DS_MLA_BYTES
    else:
        name, size = _stored(dtype, kv_dtype)
        token_bytes = width * size
    kind = "sparse_mla" if attention.indexer else "mla"
    yield LayerCache(f"{layer}.attn", kind, 1, width, name, kv_dtype, token_bytes)
    if attention.indexer:
        yield _index(layer, attention.indexer)


def _check_ds_mla(shape: ModelShape, attention: LatentAttention) -> None:
    if attention.indexer is None or (attention.kv_lora_rank, attention.rope_dim) != _DS_MLA_SHAPE:
        raise PlanError(
            f"--kv-cache-dtype {DS_MLA} for {shape.architecture} with {attention.kv_lora_rank} + {attention.rope_dim}",
            "sparse latent attention of 512 + 64 (DeepSeek-V3.2)",
            "Use fp8.",
        )


def _index(layer: str, indexer: Indexer) -> LayerCache:
    width = indexer.head_dim + indexer.head_dim // _INDEX_BLOCK * 4
    return LayerCache(f"{layer}.indexer.k_cache", "indexer", 1, width, "uint8", "auto", width)
