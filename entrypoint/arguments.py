"""The few of vLLM's arguments that are looked at before it starts; everything is passed on untouched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

__all__ = ["Arguments"]

_PARALLEL = ("--data-parallel", "--tensor-parallel", "--pipeline-parallel", "--enable-expert-parallel", "--enable-ep-")
_SHORT = {"-dp", "-tp", "-pp", "-ep", "-dpn", "-dpr", "-dpl", "-dpa", "-dpp"}


def _name(word: str) -> str:
    """The option's name as vLLM documents it: it also takes underscores, and a value after ``=``."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


class Arguments:
    """A read-only view of a ``vllm serve`` command line.

    Options that stand in a ``--config`` file are not seen; what is decided here must be safe without them.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def has(self, name: str) -> bool:
        """Whether the flag or option stands on the command line."""
        return any(_name(word) == name for word in self.words)

    def value(self, name: str) -> str | None:
        """The option's last value, as text, or None where it is not given."""
        found = None
        for word, following in self._pairs():
            if _name(word) == name:
                found = word.partition("=")[2] if "=" in word else following
        return found

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Each word with the one after it, the last with an empty one."""
        return zip_longest(self.words, self.words[1:], fillvalue="")

    @property
    def model(self) -> str | None:
        """The model: the first word, if it is no option, else ``--model``."""
        if self.words and not self.words[0].startswith("-"):
            return self.words[0]
        return self.value("--model")

    @property
    def transfer_config(self) -> dict[str, Any]:
        """``--kv-transfer-config`` as far as it is a JSON object; vLLM itself complains about any other form."""
        try:
            config = json.loads(self.value("--kv-transfer-config") or "{}")
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def extra_config(self) -> dict[str, Any]:
        """The connector's own settings in ``--kv-transfer-config``."""
        extra = self.transfer_config.get("kv_connector_extra_config")
        return extra if isinstance(extra, dict) else {}

    def parallel(self) -> list[str]:
        """The words that set the parallelism, for people to read."""
        return list(self._parallel())

    def _parallel(self) -> Iterator[str]:
        for word, following in self._pairs():
            if _name(word) in _SHORT or _name(word).startswith(_PARALLEL):
                takes_next = "=" not in word and following and not following.startswith("-")
                yield f"{word} {following}" if takes_next else word
