"""What the server is at the moment, scraped under one API server and under several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patches.framework import roster, rundir

SCRAPE = """
import sys
from pathlib import Path
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
from patches.serving_gate.registering import register
from patches.serving_gate.state_metrics import StateCollector
register(StateCollector(Path(sys.argv[1]), lambda: False))
registry = REGISTRY
if len(sys.argv) > 2:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=sys.argv[2])
print(generate_latest(registry).decode())
"""


def attest(run_dir: Path, number: int, **changes: Any) -> None:
    entry = {
        "role": "worker", "dp_rank": 0, "rank": number, "pid": os.getpid(), "patch_set": "abc", "splint": "0.1.0",
        "start_time": roster.start_time(os.getpid()), "mode": "enforce", "seams": [], "patches": [], "facts": {},
    }  # fmt: skip
    rundir.write_json(rundir.prepare(run_dir) / rundir.ROSTER / f"{number}.json", entry | changes)


@pytest.mark.parametrize("servers", ["one", "several"])
def test_readiness_processes_patch_sets_and_calls(tmp_path: Path, servers: str) -> None:
    run_dir, shared = tmp_path / "run", tmp_path / "prometheus"
    shared.mkdir()
    attest(run_dir, 0)
    attest(run_dir, 1, start_time=1, patch_set="other")
    several = servers == "several"
    scraped = subprocess.run(
        [sys.executable, "-c", SCRAPE, str(run_dir), *([str(shared)] if several else [])],
        env={"PYTHONPATH": ":".join(sys.path), **({"PROMETHEUS_MULTIPROC_DIR": str(shared)} if several else {})},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = scraped.splitlines()
    assert "splint_ready 0.0" in lines
    assert 'splint_process_up{dp_rank="0",rank="0",role="worker"} 1.0' in lines
    assert 'splint_process_up{dp_rank="0",rank="1",role="worker"} 0.0' in lines
    assert 'splint_patch_set_processes{mode="enforce",patch_set="abc",version="0.1.0"} 1.0' in lines
    assert 'splint_patch_set_processes{mode="enforce",patch_set="other",version="0.1.0"} 1.0' in lines
    assert 'splint_patch_calls_total{patch="serving_gate"} 0.0' in lines
