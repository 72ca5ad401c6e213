"""``splint image``: for whoever builds an image."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["image"]

image = typer.Typer(help="For the build of an image.", no_args_is_help=True)


class Form(str, Enum):
    """How labels are printed."""

    JSON = "json"
    OPTIONS = "options"
    """``--label`` and ``key=value`` in turns, one a line, as ``docker build`` takes them."""


@image.command()
def verify(
    before: Annotated[
        Path | None,
        typer.Option(help="What `python3 -m pip list --format=freeze` said of the base: nothing in it may have moved."),
    ] = None,
) -> None:
    """Verify that every patch for the installed base fits, by the digests of its sources; exit code 0 or 78."""
    from entrypoint.image.verify import verify as steps

    for line in steps(before):
        print(line)


@image.command()
def labels(form: Annotated[Form, typer.Option(help="How they are printed.")] = Form.JSON) -> None:
    """Print the image's labels: the patch manifest, made from the catalogue."""
    from entrypoint.image import labels as made

    found = made.labels()
    if form is Form.JSON:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"--label\n{key}={value}" for key, value in found.items()))
