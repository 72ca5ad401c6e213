"""What is only for ``make test-full`` is left out of every other run."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# An example that meets a stall of the machine is not at fault: by default more than 200 ms are.
settings.register_profile("any machine", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow]))
settings.load_profile("any machine")

# Every connection of a torch store looks up its peer's name. Where the machine's resolver drops a packet, that takes
# glibc's default of 5 s; the tests, and what they start, need no names but those in /etc/hosts.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-full", action="store_true", help="run the tests marked full, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect instead of skip: a test that does not belong to the run is no gap in it."""
    if config.getoption("--run-full"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if item not in full]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what passed tests have said, their figures above all: pytest itself shows the output of failures alone."""
    said = [report for report in terminalreporter.stats.get("passed", ()) if report.capstdout.strip()]
    if said:
        terminalreporter.section("figures")
    for report in said:
        terminalreporter.write_line(report.nodeid.rpartition("::")[2])
        for line in report.capstdout.strip().splitlines()[:20]:
            terminalreporter.write_line(f"    {line[:400]}")
