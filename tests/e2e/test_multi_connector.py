"""LMCache inside a connector of several, the LMCache server copying, several API servers: proven like the main job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.servers import Server, connector_config, engine_environment, lmcache_server, running

from patches.framework.rundir import VERDICT, read_json

CALLED = {
    "graceful_drain",
    "lmcache_failed_transfer",
    "lmcache_identity",
    "lmcache_client_params",
    "lmcache_in_process",
}


@pytest.mark.full
def test_lmcache_in_a_connector_of_several_is_proven_too(build: Callable[..., Server], tmp_path: Path) -> None:
    shared = {"SPLINT_RUN_DIR": str(tmp_path / "run"), "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}
    with lmcache_server(tmp_path / "lmcache.log", environ=engine_environment(**shared)) as cache:
        inside = json.loads(connector_config(cache.port))
        several = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
                   "kv_connector_extra_config": {"connectors": [inside]}}  # fmt: skip
        server = build("--api-server-count", "2", "--kv-transfer-config", json.dumps(several), env=shared)
        with running(server):
            server.wait_ready()
            verdict = read_json(tmp_path / "run" / VERDICT) or {}
    checks = {check["id"]: check for check in verdict["checks"]}
    print({name: (check["status"], check["reason"]) for name, check in checks.items()})
    (engine,) = checks["lmcache"]["evidence"]["engines"]
    assert engine["workers"][0]["transfer"] == "LMCacheDrivenTransferContext"
    assert checks["kv_round_trip"]["evidence"]["engines"][0]["connector"]["tokens"] > 0
    assert checks["kv_series"]["evidence"]["external_hit_tokens"]["0"] > 0
    assert set(checks["exercised"]["evidence"]["calls"]) >= CALLED
