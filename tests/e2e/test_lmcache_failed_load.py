"""Chunks that the LMCache server loses between look-up and load, with a part of the prompt in vLLM's own cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.format_engines import Engine, same
from support.servers import Server, connector_config, engine_environment, lmcache_server, running
from support.streams import prompt, until

LOSING = Path(__file__).parent / "losing"
CHUNK = 128
STORED, PROMPT = 900, 1400
STEP = 900
"""The first step behind a chunk of vLLM's own ends at 1028 tokens, four into the ninth chunk."""


@pytest.mark.full
def test_what_was_lost_is_stored_again_and_only_once_it_is_computed(
    build: Callable[..., Server], tmp_path: Path
) -> None:
    lost = tmp_path / "lost"
    path = os.pathsep.join(filter(None, [str(LOSING), os.environ.get("PYTHONPATH")]))
    environ = engine_environment(PYTHONPATH=path, LOSE_LOADS=str(lost))
    with lmcache_server(tmp_path / "lmcache.log", environ=environ) as cache:
        server = build(
            "--enable-prefix-caching", "--max-num-batched-tokens", str(STEP),
            "--kv-transfer-config", connector_config(cache.port, {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}),
            env={"SPLINT_SMOKE": "off", "VLLM_SERVER_DEV_MODE": "1"},
        )  # fmt: skip
        with running(server):
            server.wait_ready()
            loads_fail_once(Engine(server), lost)


def loads_fail_once(engine: Engine, lost: Path) -> None:
    start, whole = prompt("start", STORED), [*prompt("start", STORED), *prompt("end", PROMPT - STORED)]
    right = engine.cold("whole", prompt=whole)
    engine.ask(prompt=start)
    settled(engine)
    forgotten(engine)
    assert engine.ask(prompt=start[: CHUNK + 2])[1] == CHUNK
    lost.touch()
    answer, hits = engine.ask(prompt=whole)
    lost.unlink()
    assert (same(answer, right), hits) == (True, 6 * CHUNK), "found, and then not there"
    settled(engine)
    for _ in range(2):
        forgotten(engine)
        answer, hits = engine.ask(prompt=whole)
        print(f"{hits} tokens from LMCache, at most {apart(answer, right):.2g} nats off")
        assert (same(answer, right), hits) == (True, PROMPT // CHUNK * CHUNK)


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True))


def settled(engine: Engine) -> None:
    """Wait until no store is under way: the count of stored tokens stands still."""
    counts = [-1.0]

    def still() -> bool:
        counts.append(engine.server.count("splint_lmcache_stored_tokens_total"))
        time.sleep(0.5)
        return counts[-1] == counts[-2]

    until(still, 120)


def forgotten(engine: Engine) -> None:
    """Empty vLLM's own prefix cache."""
    assert httpx.post(f"{engine.server.base_url}/reset_prefix_cache", timeout=30).status_code == 200
