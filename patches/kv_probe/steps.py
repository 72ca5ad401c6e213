"""What a worker does for a probe, one step at a time; every step leaves the worker ready for requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from patches.kv_probe import lmcache
from patches.kv_probe.attention import attention
from patches.kv_probe.blocks import Groups, spans
from patches.kv_probe.contents import Blocks, Pages, layers_of
from patches.lmcache_identity.carrying import published
from patches.lmcache_identity.profile import KVCacheProfile

__all__ = ["STEPS"]


def _tensors(worker: Any, group: int) -> dict[str, Any]:
    """The KV tensors of a group's layers, as the layers of the model hold them.

    Layers that use another layer's cache are left out, and so are those without one.
    """
    layers = worker.vllm_config.compilation_config.static_forward_context
    names = [name for name in _names(worker, group) if _owns_cache(layers.get(name))]
    packed = {name: found for found in _packed(worker) for name in found.layer_names}
    count = worker.model_runner.kv_cache_config.num_blocks
    return {
        name: packed[name].map_kv_cache_to_manager_blocks(layers[name].kv_cache, count)
        if name in packed
        else layers[name].kv_cache
        for name in names
    }


def _names(worker: Any, group: int) -> list[str]:
    names: list[str] = worker.model_runner.kv_cache_config.kv_cache_groups[group].layer_names
    return names


def _owns_cache(layer: Any) -> bool:
    if layer is None or getattr(layer, "kv_sharing_target_layer_name", None) is not None:
        return False
    parts = layer.kv_cache if isinstance(layer.kv_cache, (list, tuple)) else (layer.kv_cache,)
    return all(part.numel() for part in parts)


def _packed(worker: Any) -> Iterator[Any]:
    """Attention groups whose layers see kernel blocks with other layers' pages between them."""
    yield from (group for groups in worker.model_runner.attn_groups for group in groups if group.kernel_block_stride)


def _pages(worker: Any, groups: Groups) -> Iterator[tuple[Pages, list[int]]]:
    """Every layer with the blocks to use in it. Linear in layers."""
    count = worker.model_runner.kv_cache_config.num_blocks
    for group, ids in enumerate(groups):
        if ids:
            yield from ((pages, ids) for pages in layers_of(_tensors(worker, group), count))


def _differing(worker: Any, groups: Groups, seed: int) -> dict[str, int]:
    """Layers with bytes other than the known ones, and how many."""
    found = {pages.name: pages.differing(Blocks(tuple(ids), seed)) for pages, ids in _pages(worker, groups)}
    return {name: count for name, count in found.items() if count}


def _write(worker: Any, groups: Groups, seed: int) -> None:
    for pages, ids in _pages(worker, groups):
        pages.write(Blocks(tuple(ids), seed))


def wipe(worker: Any, groups: Groups) -> None:
    for pages, ids in _pages(worker, groups):
        pages.wipe(ids)


def write(worker: Any, groups: Groups, seed: int) -> dict[str, Any]:
    """Write known bytes into all layers, then read all of them back: layers that share memory overwrite each other."""
    seed += lmcache.shard(worker)
    _write(worker, groups, seed)
    return {"rank": worker.rank, **_sizes(worker, groups), "differing": _differing(worker, groups, seed)}


def compare(worker: Any, groups: Groups, seed: int) -> dict[str, Any]:
    """What the blocks hold now, against the bytes that :func:`write` puts there."""
    return {"rank": worker.rank, "differing": _differing(worker, groups, seed + lmcache.shard(worker))}


def _sizes(worker: Any, groups: Groups) -> dict[str, Any]:
    """Bytes of one token over this worker's layers that grow with tokens: in the tensors, and as others say."""
    config = worker.model_runner.kv_cache_config
    sizes = spans(config)
    found = wanted = written = 0.0
    reached: list[str] = []
    left_out: list[str] = []
    for group, ids in enumerate(groups):
        tensors = _tensors(worker, group) if ids else {}
        reached += tensors
        left_out += [name for name in (_names(worker, group) if ids else ()) if name not in tensors]
        for name, tensor in tensors.items():
            block_bytes = sum(page.block_bytes for page in layers_of({name: tensor}, config.num_blocks))
            written += block_bytes * len(ids)
            spec = _spec(config.kv_cache_groups[group].kv_cache_spec, name)
            if spec.tokens_per_state > 0:
                found += block_bytes / sizes[group]
                wanted += _said(spec, name, published()) / sizes[group]
    return {
        "layers": len(reached),
        "left_out": left_out,
        "bytes_written": int(written),
        "bytes_per_token": found,
        "bytes_per_token_wanted": wanted,
        "said_by": "KVCacheProfile" if published() else "KV cache specs",
    }


def _spec(spec: Any, layer: str) -> Any:
    """The layer's own spec, where its group has several."""
    return getattr(spec, "kv_cache_specs", {}).get(layer, spec)


def _said(spec: Any, layer: str, profile: KVCacheProfile | None) -> float:
    """Bytes of one block of ``layer``, as the profile has it, or where there is none vLLM's spec."""
    row = profile.group_of(layer).row_bytes if profile else spec.num_heads * spec.state_content_size_bytes
    return float(row * spec.num_states)


STEPS: Mapping[str, Callable[..., Any]] = {
    "write": write,
    "compare": compare,
    "wipe": wipe,
    "store": lmcache.store,
    "load": lmcache.load,
    "poll": lmcache.poll,
    "connector": lmcache.worker_state,
    "attention": attention,
}
