"""``splint serve``: look once at what would fail late, set what vLLM needs, say what starts, and become vLLM."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import NoReturn

import patches
from entrypoint.preflight import runner
from entrypoint.preflight.checks import CHECKS
from entrypoint.preflight.checks.port import LAST_PORT
from entrypoint.preflight.subject import Subject
from patches.framework import kv_dtype, reach
from patches.framework.arguments import Arguments
from patches.framework.errors import EXIT_REFUSED, EXIT_USAGE, SplintError
from patches.framework.libraries import installed_version
from patches.framework.selection import check_settings, selected
from patches.framework.settings import get

__all__ = ["UsageError", "banner", "check", "main", "prepare"]


Environ = MutableMapping[str, str]


class UsageError(SplintError):
    """The command line names something that can't be."""


def _check_port(arguments: Arguments) -> None:
    text = arguments.value("--port")
    if text is not None and (not text.isdecimal() or int(text) > LAST_PORT):
        raise UsageError(f"--port {text!r}", f"a number from 0 to {LAST_PORT}", "Correct it.")


def check(arguments: Arguments, environ: Environ) -> None:
    """Refuse what would fail late or go unnoticed.

    In report mode the start-up line of the new process says what is out of reach.

    Raises:
        UsageError: the command line can't be meant that way.
        SplintError: anything else that must be mended first.
    """
    check_settings()
    if environ.get("SPLINT_MODE") != "report":
        reach.check(arguments, environ)
    _check_port(arguments)


def _preflight(arguments: Arguments, environ: Environ) -> str:
    """Run the preflight, say its warnings, and return its summary.

    Raises:
        RefusedError: a check failed, in enforce mode.
    """
    start = time.monotonic()
    results = list(runner.run(Subject(arguments, environ), runner.chosen(CHECKS, environ)))
    error = runner.refusal(results)
    if error is not None and environ.get("SPLINT_MODE") != "report":
        raise error
    for result in results:
        if result.status in ("failed", "warned"):
            _say(f"splint: preflight: {result.id}: {result.reason}")
    return runner.summary(results, time.monotonic() - start)


def prepare(environ: Environ) -> None:
    """Set what vLLM and LMCache need from their environment, where the operator has not set it."""
    if reach.plugin_is_kept_out(environ):
        environ["VLLM_PLUGINS"] = ",".join(filter(None, (environ["VLLM_PLUGINS"], reach.PLUGIN)))
    # Processes that share a cache must hash alike.
    environ.setdefault("PYTHONHASHSEED", "0")


def _cache(arguments: Arguments) -> str:
    connector = arguments.transfer_config.get("kv_connector")
    if connector is None:
        return "none"
    extra = arguments.extra_config
    host, port = extra.get("lmcache.mp.host"), extra.get("lmcache.mp.port")
    return f"{connector} at {host}:{port}" if host and port else str(connector)


def _kv_dtype(arguments: Arguments, environ: Environ) -> str:
    pinned = get(kv_dtype.SETTING, environ)
    return f"{arguments.value(kv_dtype.FLAG) or 'auto'}{f' ({kv_dtype.SETTING}={pinned})' if pinned else ''}"


def banner(arguments: Arguments, environ: Environ) -> str:
    """What is about to start, in one block."""
    chosen = selected(get("SPLINT_PATCHES", environ))
    lines = {
        "patches": f"{len(chosen)} of {len(patches.PATCH_IDS)}: {', '.join(chosen) or 'none'}",
        "mode": f"{get('SPLINT_MODE', environ)}, smoke tests {get('SPLINT_SMOKE', environ)}",
        "model": arguments.model or "vLLM's default",
        "parallel": ", ".join(arguments.parallel()) or "one engine",
        "KV cache": f"{_kv_dtype(arguments, environ)}, connector {_cache(arguments)}",
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


def _ready(words: list[str], environ: Environ) -> list[str]:
    """Check and prepare, say what starts, and return its words; a request for help is vLLM's to answer."""
    if any(word.partition("=")[0] in ("-h", "--help") for word in words):
        return words
    arguments = Arguments(words)
    check(arguments, environ)
    prepare(environ)
    obeying = _with(words, kv_dtype.words(arguments, environ))
    preflight = _preflight(Arguments(obeying), environ)
    _say(f"{banner(Arguments(obeying), environ)}\n  preflight {preflight}")
    return obeying


@contextmanager
def _ending_when_told() -> Iterator[None]:
    """Until vLLM is there, SIGTERM and SIGINT end the server at once, with code 0; what the checks started dies too."""
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _with(words: list[str], more: list[str]) -> list[str]:
    """``more`` after the options in ``words``, before any ``--``."""
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *more, *words[end:]]


def main(words: list[str]) -> int:
    """Check, prepare and become ``vllm serve``. Returns only with the exit code of a refusal."""
    environ = dict(os.environ)
    if environ.get("SPLINT_MODE") == "off":
        _say(f"vllm-splint {patches.__version__} is off (SPLINT_MODE=off): this is stock vLLM")
    else:
        try:
            with _ending_when_told():
                words = _ready(words, environ)
        except SplintError as error:
            _say(f"splint serve: {error}")
            return EXIT_USAGE if isinstance(error, UsageError) else EXIT_REFUSED
    _become_vllm(words, environ)
