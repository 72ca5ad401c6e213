"""A KV cache that gives back wrong values is caught before anything is served."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hammering import hammered
from support.servers import Server, running

from patches.framework.errors import EXIT_SMOKE_FAILED
from patches.framework.rundir import VERDICT, read_json

SABOTAGE = Path(__file__).parent / "sabotage"
PATH = os.pathsep.join(filter(None, [str(SABOTAGE), os.environ.get("PYTHONPATH")]))


def series(run: Path) -> dict[str, Any]:
    verdict = read_json(run / VERDICT) or {"checks": []}
    found = [check for check in verdict["checks"] if check["id"] == "kv_series"]
    assert len(found) == 1, verdict
    return dict(found[0])


@pytest.mark.parametrize(
    ("reads", "cache_dtype", "part", "flags"),
    [
        ("prefill", "fp8_e5m2", "prefix_hit", ()),
        ("decode", "auto", "decoded", ("--disable-log-stats",)),
        pytest.param("prefill", "auto", "prefix_hit", (), marks=pytest.mark.full),
        pytest.param("decode", "fp8_e5m2", "decoded", (), marks=pytest.mark.full),
    ],
)
def test_wrong_reads_of_the_kv_cache_end_the_server_and_nothing_is_served(
    build: Callable[..., Server], tmp_path: Path, reads: str, cache_dtype: str, part: str, flags: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    environ = {"SPLINT_RUN_DIR": str(run), "PYTHONPATH": PATH, "KV_SABOTAGE": reads}
    with running(build("--kv-cache-dtype", cache_dtype, *flags, env=environ)) as server:
        seen = hammered(server)
        assert server.wait_end() == EXIT_SMOKE_FAILED, server.tail()
    print("statuses from start to end:", dict(seen))
    assert set(seen) == {503}
    assert f"KV sabotage of {reads} reads" in server.text()
    check = series(run)
    print(reads, cache_dtype, check["reason"], check["evidence"])
    assert check["status"] == "failed"
    assert part in check["reason"]
    values = check["evidence"]["prefix_hit" if part == "prefix_hit" else "decode"].values()
    assert min(values) > 3 * check["evidence"]["tolerance"]
    assert f"smoke test kv_series FAILED: {check['reason']}" in server.text()
