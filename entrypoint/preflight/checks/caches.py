"""What is compiled and downloaded can be written down."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.preflight.check import WARN, Check, CheckFailedError, Evidence, always
from patches.framework import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]


def _places(subject: Subject) -> Iterator[tuple[str, Path]]:
    """The variable that moves each folder, and where it lies now."""
    environ = subject.environ
    home = environ.get("HOME") or _home()
    cache = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    temporary = environ.get("TMPDIR") or "/tmp"  # noqa: S108 - where Python and torch put it
    yield "TMPDIR", Path(temporary)
    yield "VLLM_CACHE_ROOT", Path(environ.get("VLLM_CACHE_ROOT") or f"{cache}/vllm")
    if subject.gpus:
        yield "TRITON_CACHE_DIR", Path(environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache")
        yield "FLASHINFER_WORKSPACE_BASE", Path(environ.get("FLASHINFER_WORKSPACE_BASE") or f"{cache}/flashinfer")
    if _downloads(subject):
        yield "HF_HOME", Path(environ.get("HF_HOME") or f"{cache}/huggingface")


def _home() -> str:
    """A user that nobody entered anywhere, as arbitrary ones in containers, has none."""
    try:
        return str(Path.home())
    except RuntimeError:
        return ""


def _downloads(subject: Subject) -> bool:
    """Whether the model has to come from a hub."""
    model, environ = subject.arguments.model, subject.environ
    if model is None or environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    return checkpoint.folder(model, subject.arguments.value("--revision"), environ) is None


def _complaint(place: Path) -> str | None:
    """Why nothing can be written to ``place``, or to the nearest folder above that exists."""
    above = place.expanduser()
    while not above.exists() and above != above.parent:
        above = above.parent
    try:
        with tempfile.TemporaryFile(dir=above):
            return None
    except OSError as error:
        return f"{place}: {os.strerror(error.errno) if error.errno else error}"


def run(subject: Subject) -> Evidence:
    places = dict(_places(subject))
    complaints = {name: text for name, place in places.items() if (text := _complaint(place))}
    evidence = {name: str(place) for name, place in places.items()}
    if complaints:
        raise CheckFailedError(
            "; ".join(f"{name} is {text}" for name, text in complaints.items()),
            "folders that this user may write to",
            f"Mount a writable volume there, or set {', '.join(complaints)} to one; a user without a home needs HOME.",
            evidence,
        )
    return evidence


CHECK = Check("caches", "Compiled kernels and downloads can be written.", WARN, 10.0, always, run)
