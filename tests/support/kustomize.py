"""The part of kustomize that deploy/k8s uses: resources, and JSON patches with a target. Anything else is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

__all__ = ["build"]

Document = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "resources", "patches"}


def build(folder: Path) -> list[Document]:
    """What ``kubectl kustomize`` prints for ``folder``, in the order of its resources."""
    rules = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := set(rules) - _KNOWN:
        raise NotImplementedError(f"{folder}: {unknown}")
    documents = [document for name in rules["resources"] for document in _load(folder / name)]
    for patch in rules.get("patches", []):
        for document in documents:
            if _is(document, patch["target"]):
                _apply(document, yaml.safe_load((folder / patch["path"]).read_text(encoding="utf-8")))
    return documents


def _load(path: Path) -> list[Document]:
    return build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _is(document: Document, target: dict[str, str]) -> bool:
    return (document["kind"], document["metadata"]["name"]) == (target["kind"], target["name"])


def _apply(document: Document, steps: list[dict[str, Any]]) -> None:
    for step in steps:
        *above, last = step["path"].strip("/").split("/")
        place: Any = document
        for key in above:
            place = place[int(key) if isinstance(place, list) else key]
        if (step["op"] == "add") == (last in place):
            raise ValueError(f"{step['op']} {step['path']}: {'there already' if last in place else 'not there'}")
        place[last] = copy.deepcopy(step["value"])
