"""The model is where the command line says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, Evidence

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]


def applies(subject: Subject) -> str | None:
    """Names on a hub are the hub's matter."""
    model = subject.arguments.model
    if model is None:
        return "no model is named"
    path = model.startswith(("/", "./", "../", "~"))
    return None if path or Path(model).is_dir() else "a name on a hub"


def run(subject: Subject) -> Evidence:
    folder = Path(subject.arguments.model or "").expanduser()
    if not folder.exists():
        raise CheckFailedError(
            f"no model at {folder}",
            "an existing folder, or the name of a model on a hub",
            "Correct the path; in a container, mount the folder there.",
        )
    return {"config": subject.model.known, "dtype": subject.model.dtype}


CHECK = Check("model", "The model is where the command line says.", REFUSE, 10.0, applies, run)
