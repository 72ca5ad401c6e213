"""What a model's files say about it, without loading anything. Standard library only.

Only what lies on this machine is read: the model's folder, or the hub's local cache.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["declared_kv_quantisation", "dtype", "folder", "read"]

_CONFIG = "config.json"
# Models that see, hear or speak keep their language model's sizes one level down.
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")


def folder(model: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """Where the model's files lie on this machine, or None.

    Args:
        model: A folder, or a name on the hub.
        revision: As given by ``--revision``; the hub's default branch where it is None.
        environ: Names the hub's cache.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    cached = _hub_cache(environ) / f"models--{model.replace('/', '--')}"
    name = revision or "main"
    commit = _text(cached / "refs" / name) or name
    snapshot = cached / "snapshots" / commit.strip()
    return snapshot if snapshot.is_dir() else None


def _hub_cache(environ: Mapping[str, str]) -> Path:
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def read(model: str | None, revision: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """The model's ``config.json``, that of its language model merged into it; empty where it is not on this machine.

    ``quantization_config`` is completed from ``hf_quant_config.json``, as vLLM does it.
    """
    place = folder(model, revision, environ) if model else None
    if place is None:
        return {}
    config = _object(place / _CONFIG)
    for name in _TEXT:
        if isinstance(config.get(name), dict):
            config |= {key: value for key, value in config[name].items() if value is not None}
    if "quantization_config" not in config:
        quantisation = _object(place / "hf_quant_config.json")
        if quantisation:
            config["quantization_config"] = {"quant_method": "modelopt", **quantisation}
    return config


def dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that the checkpoint names, as ``bfloat16``; None where it names none."""
    found = config.get("dtype") or config.get("torch_dtype")
    return found.removeprefix("torch.") if isinstance(found, str) else None


def declared_kv_quantisation(config: Mapping[str, Any]) -> str | None:
    """What the checkpoint declares its KV cache to be quantised to, in its own words; None where it declares nothing.

    With ``--kv-cache-dtype auto`` vLLM follows such a declaration.
    """
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return None
    inner = quantisation.get("quantization")
    for place in (quantisation, inner if isinstance(inner, dict) else {}):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if place.get(key):
                return f"{key} {_said(place[key])}"
    return None


def _said(scheme: Any) -> str:
    if isinstance(scheme, dict):
        return f"{scheme.get('num_bits', '?')}-bit {scheme.get('type', '')}".strip()
    return str(scheme)
