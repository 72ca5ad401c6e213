"""Which second-level tiers carry seals, and what becomes of the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patches.framework import settings
from patches.lmcache_admission import scratch
from patches.lmcache_admission.adapter import Folder, SealedL2Adapter
from patches.lmcache_admission.seal import check_speed
from patches.lmcache_admission.serdes import digest
from patches.lmcache_admission.unprotected import require_acceptance

__all__ = ["SEALED", "make_resp", "prepare", "seal_tier"]

SEALED = ("fs", "fs_native", "resp")
"""Tiers whose every object is tested here to come back bit for bit or not at all."""
FOLDERS = ("fs", "fs_native")


def prepare(tier: str, config: Any) -> None:
    """Look at a tier's configuration before LMCache builds it.

    A folder gets a place for temporary files of its own: stock's names are the same in all servers on it.

    Raises:
        OSError: that place can't be made.
        EnvironmentRefusedError: in enforce mode, where the tier carries no seals and the operator has not accepted it.
    """
    if tier not in SEALED:
        require_acceptance(tier, SEALED, "the second level")
        return
    check_speed()
    if tier in FOLDERS:
        config.relative_tmp_dir = scratch.make(Path(config.base_path), config.relative_tmp_dir or "")


def seal_tier(tier: str, config: Any, inner: Any) -> Any:
    """The tier with seals, or as it is where it can't carry them."""
    if tier not in SEALED:
        return inner
    serde = digest(config.serde_config)
    if tier not in FOLDERS:
        return SealedL2Adapter(inner, tier, serde=serde)
    base = Path(config.base_path)
    folder = Folder(
        file_of=_file_of(base),
        aligned=config.use_odirect,
        scratch=base / config.relative_tmp_dir,
        flushes=settings.get("SPLINT_LMCACHE_FSYNC") == "on",
    )
    return SealedL2Adapter(inner, tier, folder, serde=serde)


def make_resp(config: Any) -> Any:
    """The tier ``resp`` on a client that keeps its step. Defaults come from LMCache's environment variables."""
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter

    from patches.lmcache_admission.resp_client import RespClient

    client = RespClient(
        config.host or os.environ.get("LMCACHE_RESP_HOST", ""),
        config.port or int(os.environ.get("LMCACHE_RESP_PORT", "0")),
        config.num_workers,
        config.username or os.environ.get("LMCACHE_RESP_USERNAME", ""),
        config.password or os.environ.get("LMCACHE_RESP_PASSWORD", ""),
    )
    return NativeConnectorL2Adapter(client, max_capacity_gb=config.max_capacity_gb, type_name="RESPL2Adapter")


def _file_of(folder: Path) -> Callable[[Any], Path]:
    """LMCache's own names, which its native code shares."""
    from lmcache.v1.distributed.l2_adapters import fs_l2_adapter

    return lambda key: folder / fs_l2_adapter._object_key_to_filename(key)
