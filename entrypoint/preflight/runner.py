"""Running the checks, all at once: most of them wait for a process or a file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from entrypoint.checking import CheckFailedError, DoesNotApplyError, InTime, Outcome
from entrypoint.preflight.check import WARN, Check
from patches.framework import settings
from patches.framework.errors import RefusedError
from patches.framework.selection import selected
from patches.serving_gate.plan import CheckResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from entrypoint.preflight.subject import Subject

__all__ = ["SETTING", "chosen", "refusal", "run", "summary"]

SETTING = "SPLINT_PREFLIGHT"
_SLOW = "Look what holds the device or the file system, or leave the check out with SPLINT_PREFLIGHT=-{id}."


def chosen(checks: tuple[Check, ...], environ: Mapping[str, str]) -> tuple[Check, ...]:
    """The checks that ``SPLINT_PREFLIGHT`` picks.

    Raises:
        SettingError: it names one that does not exist.
    """
    names = selected(settings.get(SETTING, environ), tuple(check.id for check in checks), SETTING)
    return tuple(check for check in checks if check.id in names)


def run(subject: Subject, checks: Iterable[Check]) -> Iterator[CheckResult]:
    """The results in the order of ``checks``, each as soon as it is there.

    Statuses are ``passed``, ``skipped``, ``failed``, and ``warned`` for a failure that refuses nothing.
    """
    start = time.monotonic()
    running = [_Running(check, subject) for check in checks]
    for one in running:
        yield one.result(start)


class _Running:
    def __init__(self, check: Check, subject: Subject) -> None:
        self._check = check
        self._end = 0.0
        self._thread = InTime(check.id, lambda: self._run(subject))

    def _run(self, subject: Subject) -> Outcome:
        outcome = _outcome(self._check, subject)
        self._end = time.monotonic()
        return outcome

    def result(self, start: float) -> CheckResult:
        check = self._check
        limit = max(start + check.limit_s - time.monotonic(), 0.0)
        status, reason, evidence = self._thread.outcome(limit, _SLOW.format(id=check.id))
        if status == "failed" and check.severity == WARN:
            status = "warned"
        seconds = (self._end or time.monotonic()) - start
        return CheckResult(check.id, check.proves, status, round(seconds, 3), reason, evidence)


def _outcome(check: Check, subject: Subject) -> Outcome:
    try:
        reason = check.applies(subject)
        return ("passed", "", check.run(subject)) if reason is None else ("skipped", reason, {})
    except DoesNotApplyError as reason:
        return "skipped", str(reason), {}
    except CheckFailedError as failure:
        return "failed", str(failure), failure.evidence


def refusal(results: Iterable[CheckResult]) -> RefusedError | None:
    """What the failed checks found, as one error; None where none failed."""
    failed = [result for result in results if result.status == "failed"]
    if not failed:
        return None
    names = ",".join(f"-{result.id}" for result in failed)
    return RefusedError(
        f"preflight: {'; '.join(f'{result.id}: {result.reason}' for result in failed)}",
        "a machine and settings that can serve",
        f"To start all the same: {SETTING}={names}, or off.",
    )


def summary(results: Iterable[CheckResult], seconds: float) -> str:
    """``12 passed, 6 skipped in 1.2 s``."""
    found = list(results)
    statuses = {status: sum(result.status == status for result in found) for status in ("passed", "warned", "skipped")}
    counted = ", ".join(f"{count} {status}" for status, count in statuses.items() if count)
    return f"{counted or 'off'} in {seconds:.1f} s" if found else "off"
