"""The reference pair: a cache that keeps what it got, and one that keeps only what its engine's profile allows.

They stand for what every tier must do, and hold blocks against a profile with the code that the real paths use.
"""

from __future__ import annotations

from typing import Any

from patches.framework.errors import ProfileError
from patches.lmcache_identity.profile import KVCacheProfile, check_block

__all__ = ["AdaptiveCacheConnector", "AlignedCacheConnector", "dtype_name"]


def dtype_name(block: Any) -> str:
    """Torch's name of a tensor's dtype, without ``torch.``."""
    return str(block.dtype).removeprefix("torch.")


class AlignedCacheConnector:
    """Returns what it was given: the same bytes, dtype and shape. Blocks are torch tensors; never cast, only copied."""

    def __init__(self) -> None:
        self._blocks: dict[str, Any] = {}

    def put(self, key: str, block: Any) -> None:
        """Keep a copy of ``block``; what was under ``key`` before is replaced."""
        self._blocks[key] = block.detach().clone()

    def get(self, key: str) -> Any:
        """A copy of the block under ``key``, or None: a miss."""
        block = self._blocks.get(key)
        return None if block is None else block.clone()


class AdaptiveCacheConnector:
    """Bound to a profile: blocks of another dtype or shape come neither in nor out.

    Args:
        profile: The whole model's profile, as :mod:`patches.lmcache_identity.deriving` derives it.
        cache: Where blocks are kept; engines may share it, their fingerprints keep them apart.

    Raises:
        ProfileError: there is no profile, or none that another process could derive too.
    """

    def __init__(self, profile: KVCacheProfile | None, cache: AlignedCacheConnector | None = None) -> None:
        if profile is None or not profile.groups:
            raise ProfileError(
                "a connector without the profile of its engine",
                "the engine's own description of its KV cache",
                "Derive it from the engine's configuration; it is never guessed from the model's name.",
            )
        self._profile = profile
        self._prefix = profile.fingerprint
        self._cache = AlignedCacheConnector() if cache is None else cache

    def put(self, key: str, block: Any, layer: str | None = None) -> None:
        """Keep a block of ``layer`` (the first by default). Raises MismatchError: its dtype or shape is another."""
        check_block(self._profile, dtype_name(block), tuple(block.shape), layer)
        self._cache.put(self._name(key), block)

    def get(self, key: str, layer: str | None = None) -> Any:
        """The block under ``key``, or None: a miss. Raises MismatchError: what is stored there is not such a block."""
        block = self._cache.get(self._name(key))
        if block is not None:
            check_block(self._profile, dtype_name(block), tuple(block.shape), layer)
        return block

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"
