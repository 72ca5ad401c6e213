"""What must not leave the server with its report: secrets, and paths of the host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Redaction", "secrets_of"]

HIDDEN = "[secret]"
SHORTEST = 8

_SECRET_NAME = re.compile(r"(^|_)(KEYS?|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)")
_FORMS = re.compile(
    r"(?<=Bearer )[\w.~+/=-]{4,}|\b(?:sk|hf|ghp|glpat|xox[a-z])[-_][\w-]{8,}|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)
_PATH = re.compile(r"(?:(?<![\w./~-])|(?<=://))/(?P<top>[\w.@+~=-]+)(?:/[\w.@+~=-]+)*/?")


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """Values of the variables whose names speak of a secret; short ones and plain numbers are none."""
    named = (value for name, value in environ.items() if _SECRET_NAME.search(name.upper()))
    return [value for value in named if len(value) >= SHORTEST and not value.isdecimal()]


class Redaction:
    """Hides known secrets and what has the form of one, and shortens paths of this host to their last part.

    A path of the host is one whose first folder this machine has: ``/v1/models`` is none.

    Args:
        secrets: Known ones, such as the API keys.
        folders: Names in the root folder; by default this machine's.
    """

    def __init__(self, secrets: Iterable[str], folders: Iterable[str] | None = None) -> None:
        longest_first = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._folders = frozenset(os.listdir("/") if folders is None else folders)

    def clean(self, value: Any) -> Any:
        """``value``, JSON data, with every text in it cleaned, names included."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self.clean(name): self.clean(part) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.clean(part) for part in value]
        return value

    def _text(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        return _PATH.sub(self._shortened, _FORMS.sub(HIDDEN, text))

    def _shortened(self, found: re.Match[str]) -> str:
        whole = found.group()
        if found["top"] not in self._folders:
            return whole
        return f"…/{whole.rstrip('/').rpartition('/')[2]}"
