"""Everything together: read the command line, run the preflight, apply the rules, answer the checklists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from entrypoint.checking import CheckFailedError
from entrypoint.doctor import parsing
from entrypoint.doctor.checklists import CHECKLISTS
from entrypoint.doctor.reading import Reading
from entrypoint.doctor.rule import LEVELS, REFUSE, WARN, Finding, Rule
from entrypoint.doctor.rules import RULES
from entrypoint.preflight import runner
from entrypoint.preflight.checks import CHECKS
from entrypoint.preflight.subject import Subject
from patches.framework.arguments import Arguments

if TYPE_CHECKING:
    from patches.serving_gate.plan import CheckResult

__all__ = ["SCHEMA", "Diagnosis", "examine"]

SCHEMA = 1
OWN = "our own reading, without vLLM's defaults"


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        releases: Of vLLM and LMCache; None where one is not installed.
        read_by: Whose parser read the command line.
        preflight: The checks' results.
        findings: Worst first.
        checklists: By name, pairs of question and answer.
    """

    releases: dict[str, str | None]
    read_by: str
    preflight: tuple[CheckResult, ...]
    findings: tuple[Finding, ...]
    checklists: dict[str, tuple[tuple[str, str], ...]]

    @property
    def healthy(self) -> bool:
        """Whether nothing speaks against a start."""
        failed = any(result.status == "failed" for result in self.preflight)
        return not failed and all(finding.level != REFUSE for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "schema": SCHEMA,
            "healthy": self.healthy,
            "releases": self.releases,
            "read_by": self.read_by,
            "findings": [finding.to_json() for finding in self.findings],
            "checklists": {
                name: [{"question": question, "answer": answer} for question, answer in pairs]
                for name, pairs in self.checklists.items()
            },
            "preflight": [vars(result) for result in self.preflight],
        }


def _quiet(step: str) -> None:
    del step


def examine(words: list[str], environ: dict[str, str], say: Callable[[str], None] = _quiet) -> Diagnosis:
    """Examine a server that ``vllm serve`` with these words would be. ``say`` is told what takes long.

    Raises:
        SettingError: a ``SPLINT_*`` variable is malformed.
    """
    subject = Subject(Arguments(words), environ, thorough=True)
    checks = runner.chosen(CHECKS, environ)
    results: list[CheckResult] = []
    running = threading.Thread(target=lambda: results.extend(runner.run(subject, checks)), daemon=True)
    say("running the preflight, and vLLM's own parser: it imports vLLM, most of the time goes there …")
    started = time.monotonic()
    running.start()
    reading, complaint = _read(words, subject)
    say(f"command line read by {reading.read_by} after {time.monotonic() - started:.0f} s, preflight …")
    running.join()
    say(f"done after {time.monotonic() - started:.0f} s")
    findings = [finding for rule in (*complaint, *RULES) if (finding := rule.examine(reading))]
    return Diagnosis(
        releases={"vllm": subject.vllm, "lmcache": subject.lmcache},
        read_by=reading.read_by,
        preflight=tuple(results),
        findings=tuple(sorted(findings, key=lambda finding: list(LEVELS).index(finding.level))),
        checklists={
            name: tuple((question.text, question.answer(reading)) for question in questions)
            for name, questions in CHECKLISTS.items()
        },
    )


def _read(words: list[str], subject: Subject) -> tuple[Reading, tuple[Rule, ...]]:
    """The reading, by vLLM's parser where that can be had, and what the parser complains of."""
    if subject.vllm is None:
        return Reading(subject, parsing.own(subject.arguments), OWN), ()
    try:
        values = parsing.vllms(words, subject.environ)
    except parsing.NotTakenError as error:
        return Reading(subject, parsing.own(subject.arguments), OWN), (_not_taken(str(error)),)
    except CheckFailedError as error:
        return Reading(subject, parsing.own(subject.arguments), OWN), (_no_parser(str(error)),)
    return Reading(subject, values, f"vLLM {subject.vllm}"), ()


def _not_taken(complaint: str) -> Rule:
    return Rule(
        id="not-taken",
        level=REFUSE,
        topic="Arguments",
        what="vLLM does not take this command line.",
        why="It stops with a usage message.",
        change="Correct it as the message says.",
        found=lambda _: complaint,
    )


def _no_parser(complaint: str) -> Rule:
    return Rule(
        id="no-parser",
        level=WARN,
        topic="Arguments",
        what="vLLM's own parser could not be asked.",
        why="Defaults, aliases and mistakes in the command line were not seen; a server will meet the same trouble.",
        change="Try vllm serve --help and mend what it says.",
        found=lambda _: complaint,
    )
