"""Fingerprints of upstream source, and the store of those that a person has reviewed.

A fingerprint is the SHA-256 of one function's or class's source text: dedented, trailing blanks removed, comments
and decorators included. It is taken from the file, so nothing is imported, and it is the same under every Python.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from patches.framework.errors import FingerprintError, TargetMissingError

__all__ = ["Reviewed", "Source", "check", "installed_source", "reviewed", "source", "source_digest", "take"]

REVIEWED_FOLDER = Path(__file__).parent.parent / "reviewed"


@dataclass(frozen=True)
class Reviewed:
    """What was reviewed of one library: all digests by target and by file, each with its releases.

    Attributes:
        targets: ``module:qualname`` to {digest: releases}.
        files: ``module`` to {digest of the whole file: names in it that were reviewed}.
        decorated: targets that stand under a decorator in the source.
    """

    targets: dict[str, dict[str, tuple[str, ...]]]
    files: dict[str, dict[str, frozenset[str]]]
    decorated: frozenset[str]


def _library(module: str) -> str:
    return module.partition(".")[0]


@cache
def reviewed(library: str) -> Reviewed:
    """The reviewed fingerprints of every release of ``library`` (``vllm`` or ``lmcache``)."""
    targets: dict[str, dict[str, tuple[str, ...]]] = {}
    files: dict[str, dict[str, frozenset[str]]] = {}
    decorated: set[str] = set()
    for path in sorted(REVIEWED_FOLDER.glob(f"{library}-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for name, digest in data["targets"].items():
            known = targets.setdefault(name, {})
            known[digest] = (*known.get(digest, ()), data["release"])
        for module, digest in data["files"].items():
            names = frozenset(name for name in data["targets"] if name.partition(":")[0] == module)
            whole = files.setdefault(module, {})
            whole[digest] = whole.get(digest, frozenset()) | names
        decorated.update(data["decorated"])
    return Reviewed(targets, files, frozenset(decorated))


def installed_source(module: str) -> Path:
    """The file that defines ``module`` in this environment, found without importing it.

    Raises:
        TargetMissingError: the library or the module is not there.
    """
    library, *rest = module.split(".")
    loaded = getattr(sys.modules.get(library), "__path__", None)
    roots = list(loaded) if loaded else _package_roots(library)
    for root in roots:
        base = Path(root, *rest)
        for candidate in (base.with_suffix(".py") if rest else base / "__init__.py", base / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise TargetMissingError(f"no module {module} in this environment", "the module of a reviewed release", _REMEDY)


def _package_roots(library: str) -> list[str]:
    spec = PathFinder.find_spec(library)
    return list(spec.submodule_search_locations or ()) if spec else []


_REMEDY = (
    "Install a release that vllm-splint covers (splint patches lists them),"
    " or leave the patch out with SPLINT_PATCHES=-<id>."
)


def source_digest(text: str) -> str:
    """SHA-256 of source text, without indentation and trailing blanks."""
    lines = textwrap.dedent(text).splitlines()
    return hashlib.sha256("\n".join(line.rstrip() for line in lines).encode()).hexdigest()


def _definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Functions and classes of a body by name, those under ``if`` and ``try`` included; the last one wins."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.If, ast.Try)):
            blocks = [node.body, node.orelse, *(handler.body for handler in getattr(node, "handlers", ()))]
            for block in blocks:
                found.update(_definitions(block))
    return found


@dataclass(frozen=True)
class Source:
    """One function or class as a file has it.

    Attributes:
        text: The lines with decorators, dedented.
        line: Number of the first one, from 1.
        decorated: Whether it stands under a decorator.
        file: Digest of the whole file.
    """

    text: str
    line: int
    decorated: bool
    file: str


def source(name: str) -> Source:
    """The installed source of ``module:qualname``.

    Raises:
        TargetMissingError: the module or the name is not there.
    """
    module, _, qualname = name.partition(":")
    content = installed_source(module).read_text(encoding="utf-8")
    node = _find(ast.parse(content), qualname)
    if node is None:
        raise TargetMissingError(f"{module} defines no {qualname}", "the name that a patch replaces", _REMEDY)
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    text = textwrap.dedent("\n".join(content.splitlines()[first - 1 : node.end_lineno]))
    return Source(text, first, bool(decorators), hashlib.sha256(content.encode()).hexdigest())


def _find(tree: ast.Module, qualname: str) -> ast.stmt | None:
    body, node = tree.body, None
    for name in qualname.split("."):
        node = _definitions(body).get(name)
        if node is None:
            return None
        body = getattr(node, "body", [])
    return node


def take(names: tuple[str, ...]) -> dict[str, Any]:
    """Fingerprint ``module:qualname`` names in the installed sources.

    Returns:
        ``targets`` (name to digest), ``files`` (module to digest) and ``decorated`` (names), as in a reviewed file.

    Raises:
        TargetMissingError: a module or a name is not there.
    """
    found = {name: source(name) for name in names}
    return {
        "targets": {name: source_digest(taken.text) for name, taken in found.items()},
        "files": {name.partition(":")[0]: taken.file for name, taken in found.items()},
        "decorated": [name for name, taken in found.items() if taken.decorated],
    }


def check(names: tuple[str, ...]) -> None:
    """Compare installed sources with the reviewed ones.

    A file in which all of the names were reviewed is recognised by its own digest; any other is parsed.

    Raises:
        FingerprintError: a source differs from every reviewed one; the message names the function and the releases.
        TargetMissingError: a module or a name is not there.
    """
    by_module: dict[str, list[str]] = {}
    for name in names:
        by_module.setdefault(name.partition(":")[0], []).append(name)
    for module, wanted in by_module.items():
        known = reviewed(_library(module))
        content = installed_source(module).read_bytes()
        reviewed_here = known.files.get(module, {}).get(hashlib.sha256(content).hexdigest(), frozenset())
        if reviewed_here.issuperset(wanted):
            continue
        taken = take(tuple(wanted))["targets"]
        for name in wanted:
            _compare(name, taken[name], known)


def _compare(name: str, digest: str, known: Reviewed) -> None:
    accepted = known.targets.get(name, {})
    if digest in accepted:
        return
    releases = sorted({release for found in accepted.values() for release in found}) or ["no release"]
    raise FingerprintError(
        f"{name} has the source fingerprint {digest[:12]}",
        f"one that was reviewed ({', '.join(value[:12] for value in accepted) or 'none'}; {', '.join(releases)})",
        f"The function differs from the reviewed one: run `splint review {name}` to see it. {_REMEDY}",
    )
