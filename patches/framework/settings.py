"""Every ``SPLINT_*`` environment variable, as data. Standard library only.

The README's table of settings is generated from :data:`SETTINGS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from patches.framework import values
from patches.framework.errors import SettingError

__all__ = ["PREFIX", "SETTINGS", "Setting", "check_environment", "get"]

PREFIX = "SPLINT_"


@dataclass(frozen=True)
class Setting:
    """One environment variable: its name, default, meaning, and how its text is read."""

    name: str
    default: str
    doc: str
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    internal: bool = False

    def read(self, environ: Mapping[str, str]) -> Any:
        """The parsed value in ``environ``; an empty value counts as not set.

        Raises:
            SettingError: the text is not one of the choices or can't be parsed.
        """
        text = environ.get(self.name) or self.default
        if self.choices and text not in self.choices:
            raise SettingError(f"{self.name}={text!r}", f"one of {', '.join(self.choices)}", "Correct or unset it.")
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(f"{self.name}={text!r}", str(error), "Correct or unset it.") from error


SETTINGS = (
    Setting(
        "SPLINT_MODE",
        "enforce",
        "enforce: refuse to start without every needed patch, and to serve unproven; report: apply what fits, say what"
        " does not, serve all the same; off: stock vLLM and LMCache.",
        choices=("enforce", "report", "off"),
    ),
    Setting(
        "SPLINT_PATCHES",
        "all",
        "Which patches: all, none, a comma-separated list, or all but some (-a,-b).",
        values.names,
    ),
    Setting("SPLINT_RUN_DIR", "", "Folder for the run files; by default a private one for each server."),
    Setting(
        "SPLINT_SMOKE",
        "full",
        "Smoke tests: full, quick, or off, which opens the gate unproven.",
        choices=("full", "quick", "off"),
    ),
    Setting("SPLINT_SMOKE_TIMEOUT_S", "120", "Seconds for all smoke tests together.", values.seconds),
    Setting(
        "SPLINT_PREFLIGHT",
        "on",
        "Checks of splint serve before vLLM starts: on, off, a comma-separated list, or all but some (-a,-b).",
        values.names,
    ),
    Setting(
        "SPLINT_KV_DTYPE",
        "",
        "First aid: pins the KV cache's dtype. A name that --kv-cache-dtype takes, auto (what the checkpoint declares,"
        " else the model's dtype), or model (the model's own dtype, never quantised); a different flag is refused.",
        values.kv_dtype,
    ),
    Setting(
        "SPLINT_LMCACHE_START_TIMEOUT_S",
        "10",
        "Seconds that the engine waits at start for an answer of the LMCache server.",
        values.seconds,
    ),
    Setting(
        "SPLINT_LMCACHE_LOOKUP_TIMEOUT_S",
        "1",
        "Seconds after which a look-up in LMCache is given up and the prompt recomputed.",
        values.seconds,
    ),
    Setting(
        "SPLINT_LMCACHE_PREFETCH_TIMEOUT_S",
        "2",
        "Seconds that an LMCache server which answers may take to bring a prompt's KV from its second level, before the"
        " prompt is computed. Raise it where long prompts come from a slow one.",
        values.seconds,
    ),
    Setting(
        "SPLINT_LMCACHE_TRANSFER_TIMEOUT_S",
        "0.5",
        "Seconds that an engine step waits for the LMCache server in engine_driven mode (the worker copies itself)."
        " An engine's first store, which the smoke tests make, may take SPLINT_LMCACHE_START_TIMEOUT_S.",
        values.seconds,
    ),
    Setting(
        "SPLINT_LMCACHE_UNPROTECTED",
        "",
        "What may be used without checksums: storage tiers of LMCache and serdes by LMCache's names, plugin for tiers"
        " of your own, blend for --engine-type blend, server for an LMCache server without vllm-splint, or all.",
        values.unprotected,
    ),
    Setting(
        "SPLINT_LMCACHE_IN_PROCESS",
        "refuse",
        "What becomes of LMCacheConnectorV1 where it can't be exact: refuse the start, or leave_out, which starts"
        " without an external cache.",
        choices=("refuse", "leave_out"),
    ),
    Setting(
        "SPLINT_LMCACHE_FSYNC",
        "off",
        "on: a store of the LMCache server into a folder is done when its files are on the disk; off: when the system"
        " has them. A file that a crash has torn is a miss either way.",
        choices=("off", "on"),
    ),
    Setting(
        "SPLINT_KV_BUDGET",
        "align",
        "KV budget of the DP ranks of a MoE group: align gives all of them what the smallest can hold, strict refuses a"
        " difference, report changes nothing and says what it found.",
        choices=("align", "report", "strict"),
    ),
    Setting(
        "SPLINT_KV_BUDGET_RANKS",
        "",
        "A share of its own for single DP ranks, as in 1=0.5,3=12GiB: a fraction of the device's memory, or the size of"
        " the KV cache.",
        values.shares,
    ),
    Setting(
        "SPLINT_KV_BUDGET_TIMEOUT_S",
        "1800",
        "Seconds that a DP rank may take to load its model and measure its memory before it is named as missing.",
        values.seconds,
    ),
    Setting(
        "SPLINT_PROFILING_GROWTH_LIMIT",
        "0.25",
        "Share of a device's memory by which free memory may grow while a worker profiles; beyond it, it refuses.",
        values.share,
    ),
    Setting(
        "SPLINT_CANARY_IDLE_S",
        "off",
        "Idle seconds after which the server asks itself for one token on each of its DP ranks; without an answer"
        " /readyz says 503 until one comes.",
        values.seconds_or_off,
    ),
    Setting(
        "SPLINT_LOG",
        "text",
        "How state changes are logged on stderr, one line each: text, or json.",
        choices=("text", "json"),
    ),
    Setting("SPLINT_SUPERVISOR_PID", "", "Set by the supervising parent for its child.", internal=True),
)
# What Kubernetes sets in every container of a namespace that has a Service called `splint`.
_OF_A_SERVICE = re.compile(r"SPLINT_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The parsed value of a known setting.

    Raises:
        KeyError: ``name`` is not in :data:`SETTINGS`.
        SettingError: its value is malformed.
    """
    return _BY_NAME[name].read(os.environ if environ is None else environ)


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Check every ``SPLINT_*`` variable.

    Raises:
        SettingError: a variable is unknown (the message names the nearest known one) or malformed.
    """
    environ = os.environ if environ is None else environ
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if name not in _BY_NAME:
            if _OF_A_SERVICE.fullmatch(name):
                continue
            raise _unknown(name)
        _BY_NAME[name].read(environ)


def _unknown(name: str) -> SettingError:
    from difflib import get_close_matches

    public = [setting.name for setting in SETTINGS if not setting.internal]
    nearest = get_close_matches(name, public, n=1, cutoff=0.0)[0]
    return SettingError(f"unknown setting {name}", f"one of {', '.join(public)}", f"Did you mean {nearest}?")
