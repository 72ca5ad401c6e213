"""A model's ``config.json``, read strictly: what it is instead of a configuration is said, never taken for none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from patches.framework import checkpoint
from patches.framework.errors import PlanError

__all__ = ["read"]

_NAME, _QUANTISATION = "config.json", "hf_quant_config.json"


def read(model: str) -> dict[str, Any]:
    """The configuration of a model.

    Args:
        model: Its folder, the ``config.json`` in it, or a name where the model is in the hub's local cache.

    Raises:
        PlanError: there is none, or it is no JSON object.
    """
    named = Path(model).expanduser()
    if named.is_file() and named.name != _NAME:
        raise PlanError(f"{model}, a file", f"a model's folder, or the {_NAME} in it", "Name that.")
    wanted = str(named.parent) if named.is_file() else model
    place = checkpoint.folder(wanted, None, os.environ)
    if place is None or not (place / _NAME).exists():
        raise PlanError(f"no {_NAME} of {model} on this machine", "the model's folder", "Name it.")
    for file in (place / _NAME, place / _QUANTISATION):
        if file.exists():
            _refuse_what_is_no_object(file)
    return checkpoint.read(wanted, None, os.environ)


def _refuse_what_is_no_object(file: Path) -> None:
    found = _instead(file)
    if found:
        raise PlanError(f"{file} {found}", "a JSON object", "Restore the file, or name another folder.")


def _instead(file: Path) -> str:
    """What a file is instead of a JSON object; empty where it is one."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        return f"can't be read ({error.strerror})"
    except UnicodeDecodeError:
        return "is no text in UTF-8"
    if not text.strip():
        return "is empty"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"is no JSON ({error})"
    return "" if isinstance(content, dict) else f"holds {_KINDS[type(content)]}"


_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
}
