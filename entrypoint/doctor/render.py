"""A diagnosis for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from entrypoint.doctor.rule import HELD, NOTE, REFUSE, WARN, Finding

if TYPE_CHECKING:
    from entrypoint.doctor.examine import Diagnosis

__all__ = ["render"]

_COLOURS = {REFUSE: "bold red", WARN: "yellow", NOTE: "cyan", HELD: "green"}
_STATUS = {"passed": "green", "failed": "bold red", "warned": "yellow", "skipped": "dim"}


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _preflight(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    if not diagnosis.preflight:
        return
    table = _table("Preflight", "check", "result", "s", "what it says")
    for result in diagnosis.preflight:
        said = result.reason or result.proves
        table.add_row(
            result.id, Text(result.status, _STATUS.get(result.status, "")), f"{result.seconds:.2f}", Text(said)
        )
    yield table


def _finding(finding: Finding) -> RenderableType:
    rule = finding.rule
    head = Text.assemble((f"{finding.level:<7}", _COLOURS[finding.level]), (rule.id, "bold"), f"  {finding.found}")
    held = f"Held by our patch {rule.patch}." if finding.level == HELD else f"Change: {rule.change}"
    upstream = f"Upstream: {', '.join(rule.upstream)}" if rule.upstream else ""
    return Group(head, Padding(Text("\n".join(filter(None, (rule.what, rule.why, held, upstream)))), (0, 0, 0, 7)))


def _findings(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    yield Text("Findings", "italic")
    yield from map(_finding, diagnosis.findings)
    if not diagnosis.findings:
        yield Text("none", "green")


def _checklists(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    for name, pairs in diagnosis.checklists.items():
        table = _table(f"Checklist {name}", "question", "answer")
        for question, answer in pairs:
            table.add_row(question, Text(answer))
        yield table
        yield Text()


def _end(diagnosis: Diagnosis) -> Text:
    levels = [finding.level for finding in diagnosis.findings]
    counted = ", ".join(f"{levels.count(level)} {level}" for level in _COLOURS if level in levels)
    failed = sum(result.status == "failed" for result in diagnosis.preflight)
    verdict = (
        ("nothing speaks against a start", "bold green") if diagnosis.healthy else ("do not start this", "bold red")
    )
    return Text.assemble(verdict, f"  findings: {counted or 'none'}; checks failed: {failed}")


def render(diagnosis: Diagnosis) -> RenderableType:
    """Preflight, checklists and findings, the verdict last."""
    releases = ", ".join(f"{name} {version or 'missing'}" for name, version in diagnosis.releases.items())
    head = Text(f"{releases}; arguments read by {diagnosis.read_by}", "bold")
    return Group(
        head,
        Text(),
        *_preflight(diagnosis),
        Text(),
        *_checklists(diagnosis),
        *_findings(diagnosis),
        Text(),
        _end(diagnosis),
    )
