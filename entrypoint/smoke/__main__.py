"""``python -m entrypoint.smoke PLAN.json VERDICT.json``: what the gate starts."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from entrypoint.smoke import battery
from entrypoint.smoke.check import Context
from entrypoint.smoke.checks import CHECKS
from entrypoint.smoke.server import Server
from patches.framework import log
from patches.framework.errors import EXIT_SMOKE_FAILED, EXIT_USAGE
from patches.framework.rundir import SMOKE_SO_FAR, read_json, write_json
from patches.serving_gate.plan import CheckResult, SmokePlan


class _Teller:
    """Says each result as it comes, and keeps them where the page and the report find them while the rest runs."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / SMOKE_SO_FAR
        self._results: list[dict[str, Any]] = []

    def tell(self, result: CheckResult) -> None:
        _say(result)
        self._results.append(asdict(result))
        write_json(self._file, self._results)


def _say(result: CheckResult) -> None:
    text = f"smoke test {result.id} {result.status} in {result.seconds:.2f} s"
    text = f"{text}: {result.reason}" if result.reason else text
    log.tell("smoke", text, check=result.id, status=result.status, seconds=result.seconds)


def main(arguments: list[str]) -> int:
    """Run the battery that the plan asks for and write its verdict; the exit code says what it was."""
    try:
        plan_file, verdict_file = map(Path, arguments)
    except ValueError:
        print("usage: python -m entrypoint.smoke PLAN.json VERDICT.json", file=sys.stderr)
        return EXIT_USAGE
    data = read_json(plan_file)
    if data is None:
        print(f"splint smoke: there is no plan at {plan_file}", file=sys.stderr)
        return EXIT_USAGE
    plan = SmokePlan.from_json(data)
    verdict = battery.run(Context(plan, Server(plan), plan_file.parent), CHECKS, _Teller(plan_file.parent).tell)
    write_json(verdict_file, verdict.to_json())
    return 0 if verdict.status == "passed" else EXIT_SMOKE_FAILED


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # A check that hangs holds a thread whose end must not be waited for.
    os._exit(code)
