"""The image's labels: what it is and which patches it carries, made from the catalogue."""

from __future__ import annotations

import json

import patches
from patches.framework import roster, settings
from patches.framework.fingerprints import REVIEWED_FOLDER

__all__ = ["PREFIX", "fixed_labels", "labels"]

PREFIX = "io.vllm-splint"


def fixed_labels() -> dict[str, str]:
    """Labels that change with the catalogue alone, so that a Dockerfile can hold them.

    ``io.vllm-splint.patches`` is a JSON list of id, library, releases and upstream issues.
    """
    manifest = [
        {"id": patch.id, "library": patch.library, "releases": patch.releases, "upstream": list(patch.upstream)}
        for patch in patches.catalogue()
    ]
    return {
        "org.opencontainers.image.title": "vllm-splint",
        "org.opencontainers.image.description": "vLLM and LMCache with their known faults held, proven before serving",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": patches.__version__,
        f"{PREFIX}.patches": json.dumps(manifest, separators=(",", ":")),
        f"{PREFIX}.reviewed": " ".join(sorted(path.stem for path in REVIEWED_FOLDER.glob("*.json"))),
    }


def labels() -> dict[str, str]:
    """All labels. ``io.vllm-splint.patch-set`` is the digest of the patches' code that each process attests."""
    return {**fixed_labels(), f"{PREFIX}.patch-set": roster.patch_set_digest(settings.get("SPLINT_PATCHES", {}))}
