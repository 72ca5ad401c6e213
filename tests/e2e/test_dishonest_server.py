"""Each smoke check alone, on a real server that is dishonest in its matter: it is caught, and nothing is served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.hammering import hammered
from support.servers import Server, connector_config, lmcache_server, running

from patches.framework.errors import EXIT_SMOKE_FAILED
from patches.framework.rundir import VERDICT, read_json

pytestmark = pytest.mark.full

DISHONEST = Path(__file__).parent / "dishonest"
PATH = os.pathsep.join(filter(None, [str(DISHONEST), os.environ.get("PYTHONPATH")]))
FALSIFIED = ("--middleware", "falsified.Falsified")
RANKS = ("--data-parallel-size", "2", "--enable-expert-parallel", "--api-server-count", "1")
CACHE = ("with LMCache",)

CASES = {
    "models": (FALSIFIED, "found the models other; wanted tiny among them"),
    "chat": (FALSIFIED, "generated tokens; wanted [prompt, completion, their sum]"),
    "stream": (FALSIFIED, "generated tokens; wanted [prompt, completion, their sum]"),
    "logprobs": (FALSIFIED, "wanted finite numbers, none above 0"),
    "stop": (FALSIFIED, "for the stop string"),
    "parallel": (FALSIFIED, "Answers are mixed up or wrong under load"),
    "long_prompt": (FALSIFIED, "100 prompt tokens and 1 of the answer counted for a prompt of"),
    "dp_ranks": ((*RANKS, *FALSIFIED), "DP rank 1 counted 0 requests"),
    "roster": (RANKS, "dp_coordinator has not attested: it runs without the patches"),
    "kv_budget": (RANKS, "KV blocks by rank"),
    "exercised": ((), "patches that nobody has called"),
    "pooling": (("--runner", "pooling", "--convert", "embed", *FALSIFIED), "numbers not finite from /v1/embeddings"),
    "kv_round_trip": (CACHE, "1 differing bytes in 1 layers of DP0 rank 0, first in model.layers.0"),
    "attention": ((), "away from the float32 reference (prefill)"),
    "lmcache": (CACHE, "a degraded LMCache connector in DP0 rank 0"),
}


@pytest.fixture
def flags(tmp_path: Path) -> Iterator[Callable[[tuple[str, ...]], tuple[str, ...]]]:
    """Flags of a case; a case with LMCache gets a server of it."""
    with ExitStack() as stack:

        def flags(wanted: tuple[str, ...]) -> tuple[str, ...]:
            if wanted != CACHE:
                return wanted
            cache = stack.enter_context(lmcache_server(tmp_path / "lmcache.log"))
            return ("--kv-transfer-config", connector_config(cache.port))

        yield flags


@pytest.mark.parametrize("matter", CASES)
def test_a_dishonest_server_is_caught_by_the_check_for_its_matter_alone(
    build: Callable[..., Server], flags: Callable[[tuple[str, ...]], tuple[str, ...]], tmp_path: Path, matter: str
) -> None:
    wanted, words = CASES[matter]
    run = tmp_path / "run"
    environ = {"SPLINT_RUN_DIR": str(run), "PYTHONPATH": PATH, "DISHONEST": matter}
    with running(build(*flags(wanted), env=environ)) as server:
        seen = hammered(server)
        assert server.wait_end() == EXIT_SMOKE_FAILED, server.tail()
    print(f"{matter}: statuses from start to end {dict(seen)}")
    assert set(seen) == {503}
    (check,) = (read_json(run / VERDICT) or {"checks": []})["checks"]
    print(check["reason"])
    assert (check["id"], check["status"]) == (matter, "failed")
    assert words in check["reason"]
    assert f"smoke test {matter} FAILED: {check['reason']}" in server.text()
