"""The arguments of ``vllm serve`` that are looked at before vLLM itself reads them. Standard library only.

Everything is read as vLLM reads it: underscores as dashes, ``--name=value``, JSON given key by key
(``--kv-transfer-config.kv_connector X``), and a ``--config`` file, which the command line overrides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

__all__ = ["Arguments"]

_PARALLEL = ("--data-parallel", "--tensor-parallel", "--pipeline-parallel", "--enable-expert-parallel", "--enable-ep-")
_SHORT = {"-dp", "-tp", "-pp", "-ep", "-dpn", "-dpr", "-dpl", "-dpa", "-dpp"}
_CONFIG = "--config"


def _name(word: str) -> str:
    """The option's name as vLLM documents it; the keys of a JSON option keep their underscores."""
    name, dot, keys = word.partition("=")[0].partition(".")
    return (name.replace("_", "-") if name.startswith("--") else name) + dot + keys


class Arguments:
    """A read-only view of the words after ``vllm serve``.

    Attributes:
        words: As they stand on the command line.
        config: What the ``--config`` file adds, as words; empty where there is none or nobody can read it: vLLM
            itself complains then.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.config = _config_words(self.words)
        self._all = [*self.config, *self.words]

    def has(self, name: str) -> bool:
        """Whether the flag or option is given."""
        return any(_name(word) == name for word in self._all)

    def value(self, *names: str) -> str | None:
        """The last value given under any of the names, as text, or None."""
        found = None
        for word, following in self._pairs():
            if _name(word) in names:
                found = word.partition("=")[2] if "=" in word else following
        return found

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Each word with the one after it, the last with an empty one."""
        return zip_longest(self._all, self._all[1:], fillvalue="")

    @property
    def model(self) -> str | None:
        """The model: the first word, if it is no option, else ``--model``."""
        if self.words and not self.words[0].startswith("-"):
            return self.words[0]
        return self.value("--model")

    @property
    def transfer_config(self) -> dict[str, Any]:
        """``--kv-transfer-config`` as far as it is a JSON object; vLLM itself complains about any other form."""
        return self._json("--kv-transfer-config")

    @property
    def extra_config(self) -> dict[str, Any]:
        """The connector's own settings in ``--kv-transfer-config``."""
        extra = self.transfer_config.get("kv_connector_extra_config")
        return extra if isinstance(extra, dict) else {}

    def _json(self, name: str) -> dict[str, Any]:
        """A JSON option's value; given key by key it replaces the one that is given whole, as in vLLM."""
        single = dict(self._keys(f"{name}."))
        if single:
            return _nested(single)
        found = _parsed(self.value(name) or "{}")
        return found if isinstance(found, dict) else {}

    def _keys(self, prefix: str) -> Iterator[tuple[str, str]]:
        for word, following in self._pairs():
            if _name(word).startswith(prefix):
                yield _name(word)[len(prefix) :], word.partition("=")[2] if "=" in word else following

    def parallel(self) -> list[str]:
        """The words that set the parallelism, for people to read."""
        return list(self._parallel())

    def _parallel(self) -> Iterator[str]:
        for word, following in self._pairs():
            if _name(word) in _SHORT or _name(word).startswith(_PARALLEL):
                takes_next = "=" not in word and following and not following.startswith("-")
                yield f"{word} {following}" if takes_next else word


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _nested(single: dict[str, str]) -> dict[str, Any]:
    """``{"a.b": "1"}`` as ``{"a": {"b": 1}}``."""
    found: dict[str, Any] = {}
    for path, text in single.items():
        *above, last = path.split(".")
        place = found
        for key in above:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                return {}
        place[last] = _parsed(text)
    return found


def _config_words(words: Sequence[str]) -> list[str]:
    """The ``--config`` file as options, in its order. vLLM reads it only where the path is a word of its own."""
    if _CONFIG not in words[:-1]:
        return []
    content = _yaml(words[words.index(_CONFIG) + 1])
    return [word for key, value in content.items() for word in _option(str(key), value)]


def _yaml(path: str) -> dict[Any, Any]:
    import yaml  # vLLM brings it; only a server with a file needs it

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _option(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)] if value else []
    return [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
