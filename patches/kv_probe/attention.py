"""A worker's attention on a small shape: real cache-write op, real backend, real KV layout, against float32."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patches.kv_probe.blocks import Groups
from patches.kv_probe.reference import Kernel, attend

__all__ = ["attention", "blocks_needed"]

logger = logging.getLogger(__name__)

_OVER = 5
_SHORT = 3
_CHUNK = 7
_SPREAD = 3.0
_POWER_OF_TWO = 0.5
"""The mantissa that ``math.frexp`` gives one."""
_STORED = {
    "auto": "",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""What a ``--kv-cache-dtype`` stores, by torch's name; empty for the dtype that the model computes in."""
_BACKENDS = frozenset({"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"})
"""Backends whose metadata builders ask for no more than a batch has that stands alone."""
_BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a trial raises that has not come to an answer, torch's own errors included."""


@dataclass(frozen=True)
class Piece:
    """New tokens of one sequence in one batch: ``count`` of them behind ``context`` cached ones."""

    sequence: int
    context: int
    count: int

    @property
    def length(self) -> int:
        """Tokens of the sequence with the new ones."""
        return self.context + self.count


def _lengths(block: int) -> tuple[int, int]:
    """Tokens of the two sequences at their end: one goes over a block's end, the other is short."""
    return block + _OVER + 1 + _CHUNK, _SHORT + 2


def blocks_needed(block: int) -> tuple[int, int]:
    """Blocks of ``block`` tokens that the two sequences take."""
    long, short = _lengths(block)
    return -(-long // block), -(-short // block)


def _batches(block: int) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """Prefill of two sequences, one over a block's end; decode of both; a later chunk of one beside a decode."""
    long = block + _OVER
    yield "prefill", (Piece(0, 0, long), Piece(1, 0, _SHORT))
    yield "decode", (Piece(0, long, 1), Piece(1, _SHORT, 1))
    yield "mixed", (Piece(0, long + 1, _CHUNK), Piece(1, _SHORT + 1, 1))


def attention(worker: Any, groups: Groups, seed: int) -> dict[str, Any]:
    """Hold one layer of every attention group against the reference.

    Returns:
        ``layers`` by name, each with the largest error and the bound at that place for each batch, ``skipped`` layers
        with the reason, and ``broken`` ones with the error that their trial ended in.
    """
    from vllm.config import set_current_vllm_config

    found: dict[str, Any] = {"rank": worker.rank, "layers": {}, "skipped": {}, "broken": {}}
    with set_current_vllm_config(worker.vllm_config):
        for group, layer in _first_layers(worker):
            if reason := _reason(worker, group, layer):
                found["skipped"][layer.layer_name] = reason
                continue
            try:
                found["layers"][layer.layer_name] = _Trial(
                    worker, group, layer, groups[group.kv_cache_group_id], seed
                ).run()
            except _BROKEN as error:
                logger.exception("The attention of %s could not be tried.", layer.layer_name)
                found["broken"][layer.layer_name] = _said(layer, error)
    return found


def _said(layer: Any, error: Exception) -> str:
    return f"{type(error).__name__} in {layer.attn_backend.get_name()}: {error}"[:300]


def _first_layers(worker: Any) -> Iterator[tuple[Any, Any]]:
    layers = worker.vllm_config.compilation_config.static_forward_context
    for groups in worker.model_runner.attn_groups:
        for group in groups:
            yield group, layers[group.layer_names[0]]


def _reason(worker: Any, group: Any, layer: Any) -> str | None:
    """Why there is no reference for this layer, or None."""
    if type(layer).__name__ != "Attention" or getattr(layer, "attn_type", "") != "decoder":
        return f"no reference for {type(layer).__name__} layers"
    longest = _lengths(group.kv_cache_spec.block_size)[0]
    backend = layer.attn_backend.get_name()
    hindrances = {
        f"the backend {backend}": backend not in _BACKENDS,
        f"the KV dtype {layer.kv_cache_dtype}": layer.kv_cache_dtype not in _STORED,
        "layers on another layer's cache": layer.kv_sharing_target_layer_name is not None,
        "sinks or ALiBi": layer.has_sink or getattr(layer.impl, "alibi_slopes", None) is not None,
        "decode context parallelism": worker.vllm_config.parallel_config.decode_context_parallel_size > 1,
        "blocks that kernels split": layer.kv_cache.shape[0] != worker.model_runner.kv_cache_config.num_blocks,
        f"a window of less than {longest} tokens": layer.sliding_window is not None and layer.sliding_window < longest,
        "KV scales of single heads": layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1,
    }
    found = [name for name, hinders in hindrances.items() if hinders]
    return f"no reference for {', '.join(found)}" if found else None


class _Trial:
    """One layer on its own blocks, with keys, values and queries that the cache can hold without rounding them."""

    def __init__(self, worker: Any, group: Any, layer: Any, ids: Sequence[int], seed: int) -> None:
        import torch

        self.worker, self.group, self.layer = worker, group, layer
        self.block = int(group.kv_cache_spec.block_size)
        first, _ = blocks_needed(self.block)
        self.tables = (list(ids[:first]), list(ids[first:]))
        self.device = layer.kv_cache.device
        self.dtype = worker.model_config.dtype
        self.scales = (float(layer._k_scale), float(layer._v_scale))
        self.source = torch.Generator().manual_seed(seed)
        self.quantised_query = layer.query_quant is not None
        lengths = _lengths(self.block)
        self.keys = [self._stored((length, layer.num_kv_heads, layer.head_size), self.scales[0]) for length in lengths]
        self.values = [
            self._stored((length, layer.num_kv_heads, layer.head_size_v), self.scales[1]) for length in lengths
        ]

    def _stored(self, shape: tuple[int, ...], scale: float) -> Any:
        """Random numbers between -scale and scale that the cache stores as they are, float32."""
        return self._exact(shape, _STORED[self.layer.kv_cache_dtype]) * scale

    def _exact(self, shape: tuple[int, ...], dtype: str) -> Any:
        import torch

        stored = getattr(torch, dtype) if dtype else self.dtype
        numbers = (torch.rand(shape, generator=self.source) * 2 - 1).to(stored).float()
        if dtype == "float8_e5m2":
            # Subnormal ones, below 6e-5, a kernel may take for 0: a good server was refused for one in a first token.
            numbers[numbers.abs() < torch.finfo(stored).tiny] = 0.0
        return numbers

    def _query(self, count: int) -> Any:
        """Queries that give scores a spread of about one: softmax then weighs every key, and none is lost in noise."""
        layer = self.layer
        factor = _SPREAD / (layer.impl.scale * math.sqrt(layer.head_size) * self.scales[0])
        shape = (count, layer.num_heads, layer.head_size)
        if self.quantised_query:
            return self._exact(shape, "float8_e4m3fn") * float(layer._q_scale)
        return (self._exact(shape, "") * factor).to(self.dtype).float()

    @property
    def kernel(self) -> Kernel:
        """What this layer's kernel computes, and where it may round."""
        impl = self.layer.impl
        return Kernel(
            scale=impl.scale,
            softcap=getattr(impl, "logits_soft_cap", None) or 0.0,
            compute=str(self.dtype).removeprefix("torch."),
            weights="float8_e4m3fn" if self.quantised_query else "",
            scaled=any(math.frexp(scale)[0] != _POWER_OF_TWO for scale in self.scales),
        )

    def run(self) -> dict[str, Any]:
        """The worst element of every batch: its error, and what it may be."""
        return {name: self._batch(pieces) for name, pieces in _batches(self.block)}

    def _batch(self, pieces: tuple[Piece, ...]) -> dict[str, float]:
        import torch

        queries = [self._query(piece.count) for piece in pieces]
        keys = [self.keys[piece.sequence][piece.context : piece.length] for piece in pieces]
        values = [self.values[piece.sequence][piece.context : piece.length] for piece in pieces]
        found = self._forward(torch.cat(queries), torch.cat(keys), torch.cat(values), pieces)
        wanted = [
            attend(
                query,
                self.keys[piece.sequence][: piece.length],
                self.values[piece.sequence][: piece.length],
                piece.context,
                self.kernel,
            )
            for query, piece in zip(queries, pieces, strict=True)
        ]
        error = (found - torch.cat([answer for answer, _ in wanted])).abs()
        bound = torch.cat([part for _, part in wanted])
        share = error / bound
        worst = int(torch.nan_to_num(share, nan=torch.inf).argmax())
        numbers = {"error": error, "bound": bound, "share_of_bound": share}
        return {name: float(number.flatten()[worst]) for name, number in numbers.items()}

    def _forward(self, query: Any, key: Any, value: Any, pieces: tuple[Piece, ...]) -> Any:
        """The layer itself, in a forward context as the runner makes it; float32 on the CPU."""
        import torch
        from vllm.forward_context import create_forward_context, override_forward_context

        slots = self._slots(pieces)
        metadata = self.group.build_metadata(self._common(pieces, slots))
        name = self.layer.layer_name
        context = create_forward_context({name: metadata}, self.worker.vllm_config, slot_mapping={name: slots})
        placed = [part.to(self.dtype).to(self.device) for part in (query, key, value)]
        with torch.inference_mode(), override_forward_context(context):
            answer = self.layer(*[part.flatten(1) for part in placed])
        return answer.float().cpu().view(query.shape[0], self.layer.num_heads, self.layer.head_size_v)

    def _slots(self, pieces: tuple[Piece, ...]) -> Any:
        """Where in the cache each new token goes."""
        import torch

        return torch.tensor(
            [
                self.tables[piece.sequence][position // self.block] * self.block + position % self.block
                for piece in pieces
                for position in range(piece.context, piece.length)
            ],
            dtype=torch.int64,
            device=self.device,
        )

    def _common(self, pieces: tuple[Piece, ...], slots: Any) -> Any:
        """The batch as vLLM's runners describe it to every backend."""
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *[piece.count for piece in pieces]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([piece.length for piece in pieces], dtype=torch.int32)
        table = torch.zeros((len(pieces), max(map(len, self.tables))), dtype=torch.int32)
        for row, piece in enumerate(pieces):
            table[row, : len(self.tables[piece.sequence])] = torch.tensor(self.tables[piece.sequence])
        positions = torch.tensor([at for piece in pieces for at in range(piece.context, piece.length)])
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(pieces),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(piece.count for piece in pieces),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table.to(self.device),
            slot_mapping=slots,
            is_prefilling=torch.tensor([piece.count > 1 for piece in pieces]),
            positions=positions.to(self.device),
        )
