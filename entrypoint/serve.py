"""``splint serve``: look once at what would fail late, set what vLLM needs, say what starts, and become vLLM."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import NoReturn

import patches
from entrypoint.arguments import Arguments
from patches.framework.errors import (
    EXIT_REFUSED,
    EXIT_USAGE,
    EnvironmentRefusedError,
    RefusedError,
    SplintError,
)
from patches.framework.libraries import installed_version
from patches.framework.selection import check_settings, selected
from patches.framework.settings import get

__all__ = ["UsageError", "banner", "check", "main", "prepare"]

PLUGIN = "vllm_splint"
DEFAULT_PORT = 8000

Environ = MutableMapping[str, str]


class UsageError(SplintError):
    """The command line names something that can't be."""


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _switch(name: str, why: str) -> Callable[[Arguments, Environ], str | None]:
    return lambda _, environ: f"{name}={environ[name]} {why}" if _is_on(environ.get(name, "")) else None


def _flag(name: str, why: str) -> Callable[[Arguments, Environ], str | None]:
    return lambda arguments, _: f"{name} {why}" if arguments.has(name) else None


def _native(arguments: Arguments, environ: Environ) -> str | None:
    del environ
    on = _is_on(str(arguments.extra_config.get("use_native", "")))
    return "use_native in --kv-transfer-config replaces LMCache's connector by a copy inside vLLM" if on else None


# What takes part of a server out of the patches' reach: each names itself and why, or returns None.
OUT_OF_REACH: tuple[Callable[[Arguments, Environ], str | None], ...] = (
    _switch("VLLM_USE_RUST_FRONTEND", "answers requests in a process without Python, where no gate can stand"),
    _switch("LMCACHE_USE_UPSTREAM_MP", "replaces LMCache's connector by an older copy inside vLLM"),
    _flag("--grpc", "answers requests on a port that the gate does not guard"),
    _native,
)


def _check_reach(arguments: Arguments, environ: Environ) -> None:
    found = [reason for rule in OUT_OF_REACH if (reason := rule(arguments, environ))]
    if not found:
        return
    error = EnvironmentRefusedError(
        "; ".join(found), "a server that the patches reach whole", "Remove it, or set SPLINT_MODE=off for stock vLLM."
    )
    if environ.get("SPLINT_MODE") != "report":
        raise error
    _say(f"splint: {error}")


def _check_model(arguments: Arguments) -> None:
    model = arguments.model
    if model is None or not model.startswith(("/", "./", "../", "~")) or Path(model).expanduser().exists():
        return
    raise RefusedError(
        f"no model at {model}",
        "an existing folder, or the name of a model on a hub",
        "Correct the path; in a container, mount the folder there.",
    )


def _check_port(arguments: Arguments) -> None:
    """Find out now what vLLM would find out after it has loaded the model, or never: it sets ``SO_REUSEPORT``.

    Raises:
        UsageError: the port is not a number.
        RefusedError: nobody could listen there.
    """
    if arguments.has("--headless") or arguments.has("--uds"):
        return
    if arguments.has("--config") and not arguments.has("--port"):
        return
    host, port = arguments.value("--host") or "", _port(arguments)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RefusedError(
                f"port {port} of {host or 'all addresses'}: {error.strerror or error}",
                "an address and port that this server may listen on",
                "Stop what listens there, or choose another one with --host and --port.",
            ) from error


def _port(arguments: Arguments) -> int:
    text = arguments.value("--port")
    if text is None:
        return DEFAULT_PORT
    if not text.isdecimal() or int(text) > 65535:  # noqa: PLR2004 - the last port there is
        raise UsageError(f"--port {text!r}", "a number from 0 to 65535", "Correct it.")
    return int(text)


def check(arguments: Arguments, environ: Environ) -> None:
    """Refuse what would fail late or go unnoticed.

    Raises:
        UsageError: the command line can't be meant that way.
        SplintError: anything else that must be mended first.
    """
    check_settings()
    _check_reach(arguments, environ)
    _check_model(arguments)
    _check_port(arguments)


def prepare(environ: Environ) -> None:
    """Set what vLLM and LMCache need from their environment, where the operator has not set it."""
    named = environ.get("VLLM_PLUGINS")
    if named is not None and PLUGIN not in named.split(","):
        environ["VLLM_PLUGINS"] = ",".join(filter(None, (named, PLUGIN)))
    # Processes that share a cache must hash alike.
    environ.setdefault("PYTHONHASHSEED", "0")


def _cache(arguments: Arguments) -> str:
    connector = arguments.transfer_config.get("kv_connector")
    if connector is None:
        return "none"
    extra = arguments.extra_config
    host, port = extra.get("lmcache.mp.host"), extra.get("lmcache.mp.port")
    return f"{connector} at {host}:{port}" if host and port else str(connector)


def banner(arguments: Arguments, environ: Environ) -> str:
    """What is about to start, in one block."""
    chosen = selected(get("SPLINT_PATCHES", environ))
    lines = {
        "patches": f"{len(chosen)} of {len(patches.PATCH_IDS)}: {', '.join(chosen) or 'none'}",
        "mode": f"{get('SPLINT_MODE', environ)}, smoke tests {get('SPLINT_SMOKE', environ)}",
        "model": arguments.model or "vLLM's default",
        "parallel": ", ".join(arguments.parallel()) or "one engine",
        "KV cache": f"{arguments.value('--kv-cache-dtype') or 'auto'}, connector {_cache(arguments)}",
        "run files": environ.get("SPLINT_RUN_DIR") or "a private folder for this server",
    }
    libraries = ", ".join(f"{library} {installed_version(library) or 'missing'}" for library in ("vllm", "lmcache"))
    head = f"vllm-splint {patches.__version__} on {libraries}"
    return "\n".join([head, *(f"  {name:<10}{value}" for name, value in lines.items())])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _become_vllm(words: list[str], environ: Environ) -> NoReturn:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words]
    os.execve(command[0], command, dict(environ))  # noqa: S606 - no shell is wanted


def _ready(words: list[str], environ: Environ) -> None:
    """Check and prepare, and say what starts; a request for help is vLLM's to answer."""
    if any(word.partition("=")[0] in ("-h", "--help") for word in words):
        return
    arguments = Arguments(words)
    check(arguments, environ)
    prepare(environ)
    _say(banner(arguments, environ))


def main(words: list[str]) -> int:
    """Check, prepare and become ``vllm serve``. Returns only with the exit code of a refusal."""
    environ = dict(os.environ)
    if environ.get("SPLINT_MODE") == "off":
        _say(f"vllm-splint {patches.__version__} is off (SPLINT_MODE=off): this is stock vLLM")
    else:
        try:
            _ready(words, environ)
        except SplintError as error:
            _say(f"splint serve: {error}")
            return EXIT_USAGE if isinstance(error, UsageError) else EXIT_REFUSED
    _become_vllm(words, environ)
