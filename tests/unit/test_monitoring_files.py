"""Alert rules and dashboard ask for metrics that a server has; what Prometheus says to them is an end-to-end test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import monitoring

from patches.framework import roster, rundir

EXPORTED = """
import sys
from pathlib import Path
from prometheus_client import REGISTRY
from patches.serving_gate.metrics import publish
from patches.serving_gate.plan import CheckResult, Verdict
from patches.serving_gate.registering import register
from patches.serving_gate.state_metrics import StateCollector
publish(Verdict("passed", "full", 1.0, "", (CheckResult("chat", "", "passed", 0.1),)), Path(sys.argv[1]))
register(StateCollector(Path(sys.argv[1]), lambda: True))
print(*{sample.name for family in REGISTRY.collect() for sample in family.samples if sample.name.startswith("splint_")})
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the ``splint_*`` samples of a server with two ranks."""
    run_dir = rundir.prepare(tmp_path_factory.mktemp("run"))
    budget = {"kv_budget": {"applies": True, "policy": "align", "ranks": [{"dp_rank": 0, "blocks": 9}]}}
    entry = {
        "role": "engine_core", "dp_rank": 0, "rank": None, "pid": os.getpid(), "patch_set": "abc", "splint": "0.1.0",
        "start_time": roster.start_time(os.getpid()), "mode": "enforce", "seams": [], "facts": budget,
        "patches": [{"id": "kv_budget", "state": "applied", "reason": ""}],
    }  # fmt: skip
    rundir.write_json(run_dir / rundir.ROSTER / "1.json", entry)
    ended = subprocess.run(
        [sys.executable, "-c", EXPORTED, str(run_dir)],
        env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    "query",
    [*(rule["expr"] for rule in monitoring.alerts()), *monitoring.queries().values()],
)
def test_every_query_asks_for_metrics_that_there_are(exported: set[str], query: str) -> None:
    asked = set(re.findall(r"\bsplint_\w+", query))
    assert asked <= exported, f"{asked - exported} are not exported"
    assert asked or "vllm:" in query or "up{" in query


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    for rule in monitoring.alerts():
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
    assert len({rule["alert"] for rule in monitoring.alerts()}) == len(monitoring.alerts())


def test_every_alert_is_tested_in_both_directions() -> None:
    """promtool runs that file; here it is made sure that no alert is left out of it."""
    tests = yaml.safe_load((monitoring.FOLDER / "alerts_test.yml").read_text())["tests"]
    names = {rule["alert"] for rule in monitoring.alerts()}
    quiet = {case["alertname"] for case in tests[0]["alert_rule_test"]}
    raised = {
        re.findall('alertname="(.*?)"', sample["labels"])[0]
        for case in tests[1]["promql_expr_test"]
        for sample in case["exp_samples"]
    }
    assert quiet == raised == names


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in monitoring.panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_grafana_finds_data_source_and_dashboards() -> None:
    provisioning = monitoring.FOLDER / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((provisioning / "dashboards" / "vllm-splint.yml").read_text())["providers"][0]
    assert Path(provider["options"]["path"]).name == "dashboards"
