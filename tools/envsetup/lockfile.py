"""Lock files: one pinned, hashed distribution an entry, in the form that pip and uv read."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Pin", "canonical", "digest", "digest_pins", "read", "render"]

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s\\]+)")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    """One distribution at one version, and the digests of the files that may be installed for it."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """``name==version``."""
        return f"{self.name}=={self.version}"

    def __str__(self) -> str:
        return " \\\n".join([self.requirement, *(f"    --hash={value}" for value in self.hashes)])


def canonical(name: str) -> str:
    """The distribution's name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(path: Path) -> dict[str, Pin]:
    """The pins of a lock file by canonical name; empty where there is no such file.

    Raises:
        ValueError: an entry has no version or no hash.
    """
    if not path.exists():
        return {}
    text = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    entries = [entry for entry in text.replace("\\\n", " ").splitlines() if entry.strip()]
    return {canonical(pin.name): pin for pin in (_parse(entry, path) for entry in entries)}


def _parse(entry: str, path: Path) -> Pin:
    match = _PIN.match(entry)
    hashes = tuple(_HASH.findall(entry))
    if match is None or not hashes:
        raise ValueError(f"{path}: {entry!r} is not 'name==version --hash=sha256:...'. Run `make lock`.")
    return Pin(match["name"], match["version"], hashes)


def render(pins: list[Pin], header: str) -> str:
    """A lock file's text, sorted by name."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + "".join(f"{pin}\n" for pin in sorted(pins, key=lambda pin: canonical(pin.name)))


def digest_pins(pins: dict[str, Pin]) -> str:
    """One digest over what is pinned, not over comments and order."""
    return hashlib.sha256(render(list(pins.values()), "").encode()).hexdigest()


def digest(paths: list[Path]) -> str:
    """One digest over the names and contents of files; a missing file counts as empty."""
    total = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes() if path.is_file() else b""
        total.update(f"{path.name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()
