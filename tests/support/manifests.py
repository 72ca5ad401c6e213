"""The manifests of deploy/k8s as the tests read them: built, taken apart, and with Kubernetes' variables filled in."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from support import kustomize

__all__ = ["BASES", "FOLDER", "built", "container", "environment", "of_kind", "templates", "words"]

FOLDER = Path(__file__).parents[2] / "deploy" / "k8s"
BASES = ("one-node", "wide-ep", "wide-ep-ray")
# Set by the LeaderWorkerSet controller in every container of a group.
OF_THE_GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "vllm-splint-0.vllm-splint"}
Document = dict[str, Any]


@cache
def _built(base: str) -> list[Document]:
    return kustomize.build(FOLDER / base)


def built(base: str) -> list[Document]:
    return copy.deepcopy(_built(base))


def of_kind(base: str, kind: str) -> list[Document]:
    return [document for document in built(base) if document["kind"] == kind]


def templates(document: Document) -> Iterator[tuple[str, Document]]:
    """The pod templates of a workload, each with its name."""
    spec = document["spec"]
    if document["kind"] == "LeaderWorkerSet":
        for part in ("leader", "worker"):
            yield part, spec["leaderWorkerTemplate"][f"{part}Template"]
    elif "template" in spec:
        yield document["metadata"]["name"], spec["template"]


def container(template: Document) -> Document:
    (only,) = template["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def environment(template: Document) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(template)["env"]}


def words(template: Document, **others: str) -> list[str]:
    """The arguments after ``splint serve``, with variables filled in (``others`` win); one that nobody sets fails."""
    known = {**environment(template), **OF_THE_GROUP, **others}
    given: list[str] = container(template)["args"]
    if container(template).get("command") == ["sh", "-c"]:
        text = given[0].replace("\\\n", " ").replace('"$MODEL"', known["MODEL"])
        return text.partition("splint serve")[2].replace('"$KV_TRANSFER"', "{}").split()
    return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in given]
