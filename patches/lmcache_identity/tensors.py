"""A worker's KV tensors, held against the profile before anything is stored from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patches.framework.errors import MismatchError
from patches.lmcache_identity.connectors import dtype_name
from patches.lmcache_identity.layouts import Layout
from patches.lmcache_identity.profile import OPAQUE, KVCacheProfile, KVGroup, check_block

__all__ = ["check_tensors"]

_WITHOUT_HEADS = 3


def check_tensors(profile: KVCacheProfile, kv_caches: Mapping[str, Any]) -> None:
    """Hold every layer's tensor against its group.

    Args:
        profile: The whole model's profile.
        kv_caches: Layer name to tensor, shape ``[blocks, *block_shape]`` (with keys and values outermost in the
            ``split`` layout). A layer that the profile does not name must share the memory of one that it does.

    Raises:
        MismatchError: a tensor differs, or nobody said that it exists.
    """
    known = {layer: group for group in profile.groups for layer in group.layers}
    memory = {_address(tensor) for layer, tensor in kv_caches.items() if layer in known}
    for layer, tensor in kv_caches.items():
        group = known.get(layer)
        if group is None and _address(tensor) not in memory:
            raise MismatchError(
                f"a KV cache of {layer}",
                f"one of the {len(known)} layers that the workers told the engine core",
                "Nothing of it may enter the cache.",
            )
        if group is not None and group.dtype != OPAQUE:
            check_block(profile, dtype_name(tensor), _block_shape(tensor, profile.layout, group), layer)


def _address(tensor: Any) -> Any:
    return tensor.untyped_storage().data_ptr() if hasattr(tensor, "untyped_storage") else id(tensor)


def _block_shape(tensor: Any, layout: Layout, group: KVGroup) -> tuple[int, ...]:
    """The shape of one block in a layer's tensor, with the head axis that some MLA backends drop."""
    shape = tuple(tensor.shape)
    if layout is Layout.SPLIT and not group.is_latent:
        return shape[:1] + shape[2:]
    if layout is Layout.PACKED and group.is_latent and len(shape) == _WITHOUT_HEADS:
        return (1, *shape[1:])
    return shape[1:]
