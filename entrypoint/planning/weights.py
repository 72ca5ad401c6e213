"""Bytes of weights on one device, part by part, as vLLM lays them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from entrypoint.planning.quantisation import FLOAT32, NONE
from entrypoint.planning.shape import Experts, GroupedAttention, LatentAttention, ModelShape
from entrypoint.planning.split import Split

__all__ = ["ABSORBED", "VOCABULARY_PADDING", "stage_weights"]

VOCABULARY_PADDING = 64
"""Rows; vLLM pads embedding and output layer to a multiple, then divides by TP."""

ABSORBED = "kv_b_proj, unquantised copy"

Part = tuple[str, int]
"""Name of a part as tables show it, and bytes."""


def stage_weights(shape: ModelShape, split: Split, layers: range, dtype_bytes: int) -> dict[str, int]:
    """Bytes by part on the device of a pipeline stage that holds most.

    Args:
        shape: The model.
        split: The groups.
        layers: The stage's layers.
        dtype_bytes: Bytes of an unquantised weight.

    Raises:
        PlanError: something does not divide.
    """
    sizes: Counter[str] = Counter()
    for part, size in _stage(shape, split, layers, dtype_bytes):
        sizes[part] += size
    return {part: size for part, size in sizes.items() if size}


def _stage(shape: ModelShape, split: Split, layers: range, dtype_bytes: int) -> Iterator[Part]:
    padded = -(-shape.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    rows = split.share(padded, "the padded vocabulary")
    first = shape.ends_everywhere or layers.start == 0
    last = shape.ends_everywhere or layers.stop == shape.layers
    if first:
        yield "embedding", rows * shape.hidden * dtype_bytes
    if last and not (shape.tied and first):
        yield "output layer", rows * shape.hidden * dtype_bytes
    if last:
        yield "norms", shape.hidden * dtype_bytes
    for layer in layers:
        yield "norms", 2 * shape.hidden * dtype_bytes
        yield from _attention(shape, split, dtype_bytes)
        if shape.experts and layer in shape.sparse:
            yield from _experts(shape, shape.experts, split, dtype_bytes)
        else:
            yield "dense MLP", _mlp(shape, split.share(shape.intermediate, "the MLP's width"), split.tp, dtype_bytes)


def _attention(shape: ModelShape, split: Split, dtype_bytes: int) -> Iterator[Part]:
    attention = shape.attention
    if isinstance(attention, GroupedAttention):
        yield "attention", _grouped(attention, shape, split, dtype_bytes)
    else:
        yield "attention", _latent(attention, shape, split, dtype_bytes)
        yield "attention", _indexer(attention, shape, dtype_bytes)
        yield ABSORBED, _absorbed(attention, shape, split, dtype_bytes)


def _grouped(attention: GroupedAttention, shape: ModelShape, split: Split, dtype_bytes: int) -> int:
    scheme = shape.quantisation
    queries = split.share(attention.heads, "the number of attention heads") * attention.head_dim
    keys = split.kv_heads(attention.kv_heads) * attention.head_dim
    scheme.check("qkv_proj", output=(queries, keys))
    scheme.check("o_proj", inputs=queries if split.tp > 1 else 0)
    size = scheme.size(queries + 2 * keys, shape.hidden, dtype_bytes)
    size += scheme.size(shape.hidden, queries, dtype_bytes)
    size += attention.qkv_bias * (queries + 2 * keys) * dtype_bytes
    size += attention.output_bias * shape.hidden * dtype_bytes
    return size + attention.qk_norm * 2 * attention.head_dim * dtype_bytes


def _latent(attention: LatentAttention, shape: ModelShape, split: Split, dtype_bytes: int) -> int:
    scheme = shape.quantisation
    heads = split.share(attention.heads, "the number of attention heads")
    query = heads * (attention.nope_dim + attention.rope_dim)
    latent = attention.kv_lora_rank + attention.rope_dim
    up = heads * (attention.nope_dim + attention.v_dim)
    value = heads * attention.v_dim
    scheme.check("kv_b_proj", output=(up,))
    scheme.check("o_proj", inputs=value if split.tp > 1 else 0)
    size = attention.kv_lora_rank * dtype_bytes
    if attention.q_lora_rank is None:
        size += scheme.size(query, shape.hidden, dtype_bytes) + scheme.size(latent, shape.hidden, dtype_bytes)
    else:
        size += scheme.size(attention.q_lora_rank + latent, shape.hidden, dtype_bytes)
        size += attention.q_lora_rank * dtype_bytes + scheme.size(query, attention.q_lora_rank, dtype_bytes)
    size += scheme.size(up, attention.kv_lora_rank, dtype_bytes)
    return size + scheme.size(shape.hidden, value, dtype_bytes)


def _absorbed(attention: LatentAttention, shape: ModelShape, split: Split, dtype_bytes: int) -> int:
    """Decoding needs ``kv_b_proj`` unquantised: where it is not, vLLM makes a second copy once weights are loaded."""
    if shape.quantisation is NONE:
        return 0
    width = attention.heads // split.tp * (attention.nope_dim + attention.v_dim)
    return width * attention.kv_lora_rank * dtype_bytes


def _indexer(attention: LatentAttention, shape: ModelShape, dtype_bytes: int) -> int:
    indexer = attention.indexer
    if indexer is None or attention.q_lora_rank is None:
        return 0
    size = shape.quantisation.size(indexer.heads * indexer.head_dim, attention.q_lora_rank, dtype_bytes)
    size += (indexer.head_dim + indexer.heads) * shape.hidden * dtype_bytes
    return size + 2 * indexer.head_dim * FLOAT32


def _mlp(shape: ModelShape, own: int, shards: int, dtype_bytes: int) -> int:
    """A gated MLP that is cut into ``shards`` pieces, each ``own`` wide."""
    scheme = shape.quantisation
    scheme.check("gate_up_proj", output=(own,))
    scheme.check("down_proj", inputs=own if shards > 1 else 0)
    size = scheme.size(2 * own, shape.hidden, dtype_bytes) + scheme.size(shape.hidden, own, dtype_bytes)
    return size + shape.mlp_bias * (2 * own + shape.hidden) * dtype_bytes


def _experts(shape: ModelShape, experts: Experts, split: Split, dtype_bytes: int) -> Iterator[Part]:
    scheme = shape.quantisation
    own = split.share(experts.intermediate, "an expert's width", split.expert_shards)
    scheme.check("an expert", output=(own,))
    each = scheme.size(2 * own, shape.hidden, dtype_bytes) + scheme.size(shape.hidden, own, dtype_bytes)
    yield "experts", split.local_experts(experts.number) * each
    router = scheme if experts.router_follows and scheme.router else NONE
    yield "routers", router.size(experts.number, shape.hidden, dtype_bytes)
    yield "routers", experts.correction_bias * experts.number * FLOAT32
    if experts.shared_intermediate:
        shards = 1 if experts.shared_whole and split.sequence_parallel else split.tp
        width = split.share(experts.shared_intermediate, "the shared expert's width", shards)
        yield "shared experts", _mlp(shape, width, shards, dtype_bytes)
        yield "shared experts", experts.shared_gate * shape.hidden * dtype_bytes
