"""Which command lines start a vLLM server."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from patches.framework.arguments import Arguments

__all__ = ["drain_seconds", "is_headless", "is_serving", "leaves_out", "program"]

_ENDS_OPTIONS = "cm"
_TAKES_VALUE = "WX"
_LONG_WITH_VALUE = "--check-hash-based-pycs"

_SERVERS = ("vllm.entrypoints.openai.api_server",)
_COMMANDS = ("vllm.entrypoints.cli.main", "vllm")


def is_serving(argv: Sequence[str]) -> bool:
    """Whether an interpreter started as ``argv`` runs a vLLM server.

    Knows ``vllm serve``, ``-m vllm.entrypoints.openai.api_server``, ``-m vllm.entrypoints.cli.main serve`` and the
    same two modules started by path, each after any options of the interpreter.
    """
    name, arguments = program(argv)
    return name in _SERVERS or (name in _COMMANDS and arguments[:1] == ["serve"])


def program(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The module that an interpreter started as ``argv`` runs (a script as what it stands for), and its arguments."""
    return _program(list(argv[1:]))


def is_headless(argv: Sequence[str]) -> bool:
    """Whether the server has no HTTP side (``--headless``, also in a ``--config`` file)."""
    return _arguments(argv).has("--headless")


def drain_seconds(argv: Sequence[str], default: float = 0.0) -> float:
    """Seconds that ``--shutdown-timeout`` grants to requests in flight; ``default`` where it is not given.

    A ``--config`` file may give it too; the command line wins.
    """
    given = _arguments(argv).value("--shutdown-timeout")
    return default if given is None else _seconds(given)


def _arguments(argv: Sequence[str]) -> Arguments:
    from patches.framework.arguments import Arguments  # not at the start of every Python process

    return Arguments(argv[1:])


def leaves_out(selection: str, patch_id: str) -> bool:
    """Whether the patch ``patch_id`` is not among those that ``SPLINT_PATCHES`` picks."""
    names = [name.strip() for name in selection.split(",") if name.strip()]
    if not names or names == ["all"]:
        return False
    return f"-{patch_id}" in names or (patch_id not in names and not names[0].startswith("-"))


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0


def _program(arguments: list[str]) -> tuple[str, list[str]]:
    while arguments:
        option = arguments.pop(0)
        if option == "--":
            return _script(arguments)
        if not option.startswith("-") or option == "-":
            return _script([option, *arguments])
        kind, value = _short_option(option)
        if kind == "c":
            break
        if kind == "m":
            return _module([value, *arguments] if value else arguments)
        if (kind and not value) or option == _LONG_WITH_VALUE:
            arguments = arguments[1:]
    return "", []


def _short_option(option: str) -> tuple[str, str]:
    """The letter in a cluster like ``-uW`` that takes a value, and what of the value stands in the same word."""
    if not option.startswith("--"):
        for position, letter in enumerate(option[1:], start=2):
            if letter in _ENDS_OPTIONS + _TAKES_VALUE:
                return letter, option[position:]
    return "", ""


def _module(arguments: list[str]) -> tuple[str, list[str]]:
    return (arguments[0], arguments[1:]) if arguments else ("", [])


def _script(arguments: list[str]) -> tuple[str, list[str]]:
    path, rest = _module(arguments)
    for module in (*_SERVERS, _COMMANDS[0]):
        if path.endswith("/" + module.replace(".", "/") + ".py"):
            return module, rest
    return ("vllm", rest) if path.rpartition("/")[2] == "vllm" else ("", [])
