"""What takes a server, or a part of it, out of the patches' reach. Standard library only.

One table for everything that refuses it: the start-up line, ``splint serve``, each process, ``splint doctor``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patches.framework.errors import EnvironmentRefusedError

if TYPE_CHECKING:
    from patches.framework.arguments import Arguments

__all__ = [
    "COMMANDS",
    "CONNECTOR_SETTINGS",
    "FLAGS",
    "PLUGIN",
    "VARIABLES",
    "Switch",
    "check",
    "check_command",
    "found",
    "plugin_is_kept_out",
]

PLUGIN = "vllm_splint"
_CLI = "vllm.entrypoints.cli.main"


@dataclass(frozen=True)
class Switch:
    """A variable, flag, connector setting or command, and why no patch reaches what it does.

    Attributes:
        name: As the operator writes it.
        why: Follows the name in a sentence.
        off: The values that leave a variable off, as the library reads it.
        abbreviations: Of a flag, those that argparse takes for it.
    """

    name: str
    why: str
    off: tuple[str, ...] = ("",)
    abbreviations: tuple[str, ...] = ()


VARIABLES = (
    Switch(
        "VLLM_USE_RUST_FRONTEND", "answers requests in a process without Python, where no gate can stand", ("", "0")
    ),
    # vLLM asks only whether it is set: 0 turns it on, too.
    Switch("LMCACHE_USE_UPSTREAM_MP", "replaces LMCache's connector by an older copy inside vLLM"),
)
FLAGS = (Switch("--grpc", "answers requests on a port that the gate does not guard", abbreviations=("--gr", "--grp")),)
CONNECTOR_SETTINGS = (
    Switch("use_native", "in --kv-transfer-config replaces LMCache's connector by a copy inside vLLM"),
)
COMMANDS = (
    Switch("vllm snapshot create", "captures processes that are later taken up without their start-up checks"),
    Switch("vllm snapshot restore", "takes up captured processes without their start-up checks"),
    Switch("vllm.entrypoints.grpc_server", "answers requests on a port that the gate does not guard"),
    Switch("vllm.entrypoints.launchers.grpc_server", "answers requests on a port that the gate does not guard"),
    Switch(
        "lmcache.v1.multiprocess.server",
        "starts in its main module, where no patch reaches it (`lmcache server` does the same, and has an HTTP port)",
    ),
)


def found(arguments: Arguments | None, environ: Mapping[str, str]) -> list[str]:
    """Everything that is on, each with its reason; without arguments only the environment is looked at."""
    return [*_variables(environ), *(_given(arguments) if arguments else ())]


def _variables(environ: Mapping[str, str]) -> Iterator[str]:
    for switch in VARIABLES:
        text = environ.get(switch.name, "")
        if text not in switch.off:
            yield f"{switch.name}={text} {switch.why}"


def _given(arguments: Arguments) -> Iterator[str]:
    for switch in FLAGS:
        if any(map(arguments.has, (switch.name, *switch.abbreviations))):
            yield f"{switch.name} {switch.why}"
    for switch in CONNECTOR_SETTINGS:
        if arguments.extra_config.get(switch.name):
            yield f"{switch.name} {switch.why}"


def check(arguments: Arguments | None, environ: Mapping[str, str]) -> None:
    """Refuse a server that the patches would reach only in part.

    Raises:
        EnvironmentRefusedError: something of the table is on.
    """
    _refuse(found(arguments, environ))


def check_command(program: str, words: Sequence[str]) -> None:
    """Refuse a program that starts a server which the patches do not reach.

    Args:
        program: The module that runs, or ``vllm``.
        words: Its arguments.

    Raises:
        EnvironmentRefusedError: it is one of the table.
    """
    command = " ".join(("vllm" if program == _CLI else program, *words[:2]))
    _refuse([f"{switch.name} {switch.why}" for switch in COMMANDS if f"{command} ".startswith(f"{switch.name} ")])


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        raise EnvironmentRefusedError(
            "; ".join(reasons),
            "a server that the patches reach whole",
            "Remove it, or set SPLINT_MODE=off for stock vLLM.",
        )


def plugin_is_kept_out(environ: Mapping[str, str]) -> bool:
    """Whether ``VLLM_PLUGINS`` is set and does not name our plugin: vLLM would not call it."""
    named = environ.get("VLLM_PLUGINS")
    return named is not None and PLUGIN not in named.split(",")
