"""``SPLINT_SMOKE=quick`` on the main job's server: what it leaves out, and that it is quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.servers import Server, connector_config, engine_environment, lmcache_server, running

from patches.framework.rundir import VERDICT, read_json

QUICK_S = 5.0


@pytest.mark.full
def test_quick_smoke_tests_take_five_seconds_at_most(build: Callable[..., Server], tmp_path: Path) -> None:
    shared = {"SPLINT_RUN_DIR": str(tmp_path / "run"), "SPLINT_SMOKE": "quick"}
    with lmcache_server(tmp_path / "lmcache.log", environ=engine_environment(**shared)) as cache:
        server = build(
            "--data-parallel-size", "2", "--enable-expert-parallel", "--api-server-count", "1",
            "--kv-cache-dtype", "fp8_e5m2", "--kv-transfer-config", connector_config(cache.port), env=shared,
        )  # fmt: skip
        with running(server):
            server.wait_ready()
            verdict = read_json(tmp_path / "run" / VERDICT) or {}
    spent = {check["id"]: check["seconds"] for check in verdict["checks"]}
    print(f"quick smoke tests {verdict['status']} in {verdict['seconds']} s: {spent}")
    left_out = {check["id"] for check in verdict["checks"] if "SPLINT_SMOKE=quick leaves it out" in check["reason"]}
    assert (verdict["status"], verdict["level"]) == ("passed", "quick")
    assert {"parallel", "long_prompt"} <= left_out
    assert verdict["seconds"] <= QUICK_S
