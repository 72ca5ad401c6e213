"""Running the checks one after the other, none for longer than its share, and summing up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

import httpx
import openai

from entrypoint.checking import CheckFailedError, DoesNotApplyError, Evidence, InTime, Outcome, late
from entrypoint.smoke.check import Check, Context
from patches.serving_gate.plan import CheckResult, Verdict

__all__ = ["run"]

MIN_SHARE_S = 5.0

_SLOW = "Look for a stalled engine in the log, or raise SPLINT_SMOKE_TIMEOUT_S where the hardware is that slow."

Report = Callable[[CheckResult], None]


def _quiet(result: CheckResult) -> None:
    del result


def run(context: Context, checks: Iterable[Check], report: Report = _quiet) -> Verdict:
    """Run every check that applies and tell ``report`` of each result as it comes.

    The verdict is ``failed`` as soon as one check failed or none passed at all.
    """
    start = time.monotonic()
    deadline = start + context.plan.timeout_s
    results = []
    for check in checks:
        results.append(_result(check, context, deadline))
        report(results[-1])
    statuses = [result.status for result in results]
    return Verdict(
        status="failed" if "failed" in statuses or "passed" not in statuses else "passed",
        level=context.plan.level,
        seconds=round(time.monotonic() - start, 3),
        finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        checks=tuple(results),
    )


def _result(check: Check, context: Context, deadline: float) -> CheckResult:
    start = time.monotonic()
    reason = check.applies(context.plan)
    if reason is not None:
        return CheckResult(check.id, check.proves, "skipped", 0.0, reason)
    limit = min(max(check.share * context.plan.timeout_s, MIN_SHARE_S), deadline - start)
    if limit > 0:
        status, reason, evidence = InTime(check.id, lambda: _outcome(check, context)).outcome(limit, _SLOW)
    else:
        status, reason, evidence = "failed", late(0.0, _SLOW), {}
    return CheckResult(check.id, check.proves, status, round(time.monotonic() - start, 3), reason, evidence)


def _outcome(check: Check, context: Context) -> Outcome:
    try:
        evidence = check.run(context)
    except DoesNotApplyError as reason:
        return "skipped", str(reason), reason.evidence
    except CheckFailedError as failure:
        return "failed", str(failure), failure.evidence
    except (openai.OpenAIError, httpx.HTTPError) as error:
        return "failed", _unanswered(error), {}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return "failed", _malformed(error), {}
    return "passed", "; ".join(_left_out(evidence)), evidence


def _left_out(evidence: Evidence) -> list[str]:
    """What a check that passed has not looked at, each reason once: evidence has it under ``skipped``."""
    parts = dict.fromkeys(_skipped("", evidence))
    return [f"without {part}: {reason}" for part, reason in parts]


def _skipped(part: str, found: Any) -> Iterator[tuple[str, str]]:
    if isinstance(found, list):
        for item in found:
            yield from _skipped(part, item)
    elif isinstance(found, dict):
        for name, value in found.items():
            if name != "skipped":
                yield from _skipped(name, value)
            elif isinstance(value, dict):
                yield from value.items()
            else:
                yield part, value


def _unanswered(error: Exception) -> str:
    if isinstance(error, openai.APIStatusError):
        return _status(error.status_code, error.message)
    if isinstance(error, httpx.HTTPStatusError):
        return _status(error.response.status_code, error.response.text[:500])
    cause = error.__cause__ or error
    return f"found no answer ({type(error).__name__}: {cause}); wanted one. Look whether the engine still runs."


def _status(status: int, message: str) -> str:
    return f"found HTTP {status}: {message}; wanted 200. Look for the error in the API server's and the engine's logs."


def _malformed(error: Exception) -> str:
    return (
        f"found an answer that could not be read ({type(error).__name__}: {error}); wanted the OpenAI API's form. "
        "Another program may be listening on this port."
    )
