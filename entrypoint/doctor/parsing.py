"""vLLM's own parser, in a process of its own: it knows every alias, default and ``--config`` file.

``python -m entrypoint.doctor.parsing <arguments of vllm serve>`` prints what it made of them, as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import sys
from typing import Any

from entrypoint.preflight.isolated import output
from patches.framework.arguments import Arguments

__all__ = ["LIMIT_S", "NotTakenError", "own", "vllms"]

LIMIT_S = 180.0
"""An import of vLLM, on a slow disk."""

_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
}


class NotTakenError(Exception):
    """vLLM does not take the command line; the message is its own."""


def vllms(words: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """The values of all arguments, as vLLM reads the words after ``vllm serve``.

    Raises:
        NotTakenError: vLLM would stop with a usage message.
        CheckFailedError: its parser could not be run.
    """
    command = (sys.executable, "-P", "-m", "entrypoint.doctor.parsing", *words)
    quiet = {**environ, "SPLINT_MODE": "off", "VLLM_LOGGING_LEVEL": "ERROR"}
    said = output(command, limit_s=LIMIT_S, environ=quiet, hint="Is vLLM whole? Try vllm serve --help.")
    found = json.loads(said.splitlines()[-1])
    if "error" in found:
        raise NotTakenError(found["error"])
    return dict(found)


def own(arguments: Arguments) -> dict[str, Any]:
    """The given arguments by vLLM's names for them, where its parser can't be had: no defaults, no check."""
    words = [*arguments.config, *arguments.words]
    found: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        name, equals, text = word.partition("=")
        if not name.startswith("-") or "." in name:
            continue
        dest = _SHORT.get(name, name.lstrip("-").replace("-", "_"))
        value = text if equals else None if _is_option(following) else following
        if value is None and dest.startswith("no_"):
            found[dest.removeprefix("no_")] = False
        else:
            found[dest] = True if value is None else _value(value)
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    """vLLM's configuration objects as JSON."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _parse(words: list[str]) -> dict[str, Any]:
    from vllm.entrypoints.cli.serve import ServeSubcommand

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser(prog="vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            found = parser.parse_args(["serve", *words])
            command.validate(found)
    except SystemExit:
        return {"error": complaint.getvalue().strip().rpartition("error: ")[2]}
    except (ValueError, TypeError, OSError, AssertionError) as error:
        return {"error": str(error)}
    return dict(vars(found))


def main() -> None:
    """Print what vLLM makes of the command line."""
    found = {name: value for name, value in _parse(sys.argv[1:]).items() if not name.startswith("dispatch")}
    print(json.dumps(found, default=_plain))


if __name__ == "__main__":
    main()
