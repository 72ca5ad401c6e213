"""This process: its mode, its patches, its role, and what it says about itself in the roster."""

from __future__ import annotations

import atexit
import os
import platform
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import patches
from patches import supervision
from patches.framework import aliases, kv_dtype, log, reach, roster, rundir, settings, tallies, timing
from patches.framework.application import Application
from patches.framework.errors import (
    EXIT_REFUSED,
    AlreadyReplacedError,
    BootstrapError,
    EnvironmentRefusedError,
    RefusedError,
    RunDirectoryError,
)
from patches.framework.libraries import DISTRIBUTIONS, installed_version
from patches.framework.records import Role
from patches.framework.selection import check_settings

__all__ = ["Process", "current", "leave_word", "refuse", "start"]

_process: Process | None = None


class Process:
    """Everything that vllm-splint holds in one process. There is at most one; see :func:`start`."""

    def __init__(self) -> None:
        check_settings()
        self.mode: str = settings.get("SPLINT_MODE")
        self.selection: tuple[str, ...] = settings.get("SPLINT_PATCHES")
        self.identity: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.verified = False
        # An LMCache server that has not begun to serve: no parent stands above it to give its end a code.
        self.alone = bool(supervision.cache_server(sys.orig_argv))
        self.rebound: list[str] = []
        self._lock = threading.RLock()
        self.application = Application(patches.catalogue(), refuse=self.enforcing, on_change=self.attest)
        self.application.select(self.selection)
        tallies.on_new_name(self.attest)

    @property
    def enforcing(self) -> bool:
        """Whether a patch that does not fit keeps the server from serving."""
        return self.mode == "enforce"

    def take_role(self, role: Role, *, dp_rank: int | None = None, rank: int | None = None) -> None:
        """Say what this process is; from now on it is part of the roster."""
        self.identity = {"role": role.value, "dp_rank": dp_rank, "rank": rank}
        run_dir = rundir.current()
        if run_dir is None and role in (Role.API_SERVER, Role.LAUNCHER, Role.LMCACHE_SERVER):
            run_dir = _adopt_run_dir()
        if run_dir is not None:
            with timing.phase("roster"):
                rundir.prepare(run_dir)
                self.application.counters.share(self._file(run_dir).with_suffix(".calls"))
                tallies.share(self._file(run_dir).with_suffix(tallies.SUFFIX))
        self.attest()

    def attest(self) -> None:
        """Write this process's attestation; a process without a role or a run directory writes none."""
        run_dir = rundir.current()
        if run_dir is None or not self.identity:
            return
        with self._lock, timing.phase("roster"):
            rundir.write_json(self._file(run_dir), self.attestation())

    def take_config(self, vllm_config: Any) -> None:
        """Note what the engine core's configuration says of the KV cache, and check what the operator pinned of it.

        Raises:
            SettingError: in enforce mode, where the KV dtype is not the pinned one.
        """
        pinned = settings.get(kv_dtype.SETTING)
        self.note(kv_cache_dtype=kv_dtype.said(vllm_config), **({"kv_cache_dtype_pinned": pinned} if pinned else {}))
        try:
            kv_dtype.check_engine(vllm_config, os.environ)
        except RefusedError as error:
            self.refuse(error)

    def note(self, **facts: Any) -> None:
        """Add facts that others need to know about this process (JSON values) to its attestation."""
        self.facts |= facts
        self.attest()

    def attestation(self) -> dict[str, Any]:
        """What this process says about itself, ready for JSON."""
        states = self.application.states.items()
        return {
            "schema": roster.SCHEMA,
            **self.identity,
            "pid": os.getpid(),
            "start_time": roster.start_time(os.getpid()),
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "splint": patches.__version__,
            "libraries": {library: installed_version(library) for library in DISTRIBUTIONS},
            "mode": self.mode,
            "patch_set": roster.patch_set_digest(self.selection),
            "plugin_verified": self.verified,
            "facts": self.facts,
            "rebound_aliases": self.rebound,
            "patches": [{"id": name, "state": found.state.value, "reason": found.reason} for name, found in states],
            "missed": [target.name for target in self.application.missed()],
            "seams": list(self.application.counters.names),
            "tallied": list(tallies.names()),
            "timings_ms": timing.phases_ms(),
        }

    def _file(self, run_dir: Path) -> Path:
        return run_dir / rundir.ROSTER / f"{os.getpid()}.json"

    def verify(self) -> None:
        """Prove that this process carries its patches: what vLLM's plugin call asks for.

        Raises:
            RefusedError: in enforce mode, where a patch is missing, displaced or refused, or can't reach its work.
        """
        try:
            self.check_environment()
            if self.application.refusal is not None:
                raise self.application.refusal
            self._check_places()
            with timing.phase("alias scan"):
                self.rebound += aliases.rebind(
                    found for state in self.application.states.values() for found in state.replaced.values()
                )
        except RefusedError as error:
            self.refuse(error)
            return
        self.verified = True
        self.attest()

    def verify_cache_server(self) -> None:
        """Prove that an LMCache server, which has no plugin, carries its patches, before it takes a connection.

        Raises:
            RefusedError: in enforce mode, where a patch is missing, displaced or refused.
        """
        try:
            if self.application.refusal is not None:
                raise self.application.refusal
            self._check_places()
        except RefusedError as error:
            self.refuse(error)

    def check_environment(self) -> None:
        """Look for switches that take work out of the patches' reach.

        Raises:
            EnvironmentRefusedError: one is on.
        """
        reach.check(None, os.environ)
        if reach.plugin_is_kept_out(os.environ):
            raise EnvironmentRefusedError(
                f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r} keeps the {reach.PLUGIN} plugin from running",
                f"{reach.PLUGIN} in it",
                f"Add {reach.PLUGIN} to VLLM_PLUGINS, or unset it.",
            )

    def _check_places(self) -> None:
        missed = self.application.missed()
        if missed:
            raise BootstrapError(
                f"{missed[0].module} was imported before its patch was registered ({len(missed)} target(s) bare)",
                "the start-up hooks before any import of vLLM or LMCache",
                "Reinstall vllm-splint (its .pth file must lie in this environment) and start Python without -S or -I.",
            )
        for found in self.application.displaced():
            raise AlreadyReplacedError(
                f"somebody replaced {found.target.name} after its patch",
                "the patch in its place",
                "Remove the package that patches it too, or leave the patch out with SPLINT_PATCHES.",
            )

    def refuse(self, error: RefusedError) -> None:
        """Leave word for the supervisor and raise; in report mode say it on stderr and go on.

        ``lmcache server`` has no supervisor: until it serves it ends here, because LMCache's web framework would end
        it with a code of its own.
        """
        if not self.enforcing or self.alone:
            log.tell("refused", f"{error}", mode=self.mode)
        if not self.enforcing:
            return
        leave_word(error, self.identity)
        if self.alone:
            os._exit(EXIT_REFUSED)
        raise error

    def forked(self) -> None:
        """A forked child has the patches but not its parent's identity."""
        self.identity = {}
        self.verified = False
        self.application.counters.reset()
        tallies.reset()


def _adopt_run_dir() -> Path:
    """A run directory for a server that has no supervising parent, as one that another program starts by a call."""
    run_dir = rundir.create()
    os.environ[rundir.ENV] = str(run_dir)
    atexit.register(shutil.rmtree, run_dir, ignore_errors=True)
    return run_dir


def leave_word(error: RefusedError, identity: Mapping[str, Any]) -> None:
    """Tell the supervisor why this process refuses to serve, where there is a run directory to tell it in."""
    run_dir = rundir.current()
    if run_dir is None:
        return
    content = {**identity, "pid": os.getpid(), "kind": type(error).__name__}
    content |= {"found": error.found, "wanted": error.wanted, "remedy": error.remedy}
    with suppress(RunDirectoryError):  # it may be what is refused; the process must end with that all the same
        rundir.write_json(rundir.prepare(run_dir) / rundir.REFUSED / f"{os.getpid()}.json", content)


def current() -> Process | None:
    """The process's state, or None where the start-up hooks did not run."""
    return _process


def refuse(error: RefusedError) -> None:
    """Refuse to serve from inside a wrapper; returns where the mode only reports.

    Raises:
        RefusedError: ``error``, where the mode enforces or the start-up hooks did not run.
    """
    if _process is None:
        raise error
    _process.refuse(error)


def start() -> Process:
    """Create this process's state (once) and keep it right across forks.

    Raises:
        SettingError: an ``SPLINT_*`` variable is unknown or malformed.
    """
    global _process
    if _process is None:
        try:
            _process = Process()
        except RefusedError as error:
            leave_word(error, {})
            raise
        os.register_at_fork(after_in_child=_process.forked)
    return _process
