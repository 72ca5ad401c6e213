"""The LMCache server's second level on a real Redis: bit for bit, or a miss; and what its death costs."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.lmcache_tiers import DTYPES, Memory, apply, damaged, key, layout, load, look_up, make_tier, same, store
from support.redis import LIVE_SILENT_S, Redis, redis_server

from patches.lmcache_admission import PATCH

pytest.importorskip("lmcache")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning",  # LMCache's logging
    "ignore::FutureWarning",  # Google's libraries, on Python's and their own releases
)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    apply(PATCH, monkeypatch)
    found = Memory()
    yield found
    found.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Redis]:
    with redis_server(tmp_path) as found:
        yield found


def tier_on(server: Redis) -> Any:
    return make_tier("resp", host="127.0.0.1", port=server.port, num_workers=2)


def test_every_dtype_comes_back_bit_for_bit(memory: Memory, server: Redis) -> None:
    with tier_on(server) as tier:
        for number, dtype in enumerate(DTYPES):
            written, read = memory.random(layout([dtype]), 3, seed=number), memory.allocate(layout([dtype]), 3)
            keys = [key(100 * number + place) for place in range(3)]
            assert store(tier, keys, written)
            assert look_up(tier, keys) == load(tier, keys, read) == [0, 1, 2], dtype
            assert same(written, read), dtype


@pytest.mark.timeout(300)
def test_of_a_thousand_damaged_objects_none_is_admitted_and_stores_heal(memory: Memory, server: Redis) -> None:
    chance = random.Random(20261130)
    desc = layout(["uint8"], [2, 2, 8, 32])
    written, read = memory.random(desc, 250), memory.allocate(desc, 250)
    keys = [key(number) for number in range(250)]
    with redis.Redis(port=server.port) as client, tier_on(server) as tier:
        assert store(tier, keys, written)
        good = {name: client.get(name) for name in client.keys("*")}
        names = sorted(good)
        for _ in range(4):
            for place, name in enumerate(names):
                bad = damaged(good[name], good[names[place - 1]], chance)
                client.set(name, bad if bad != good[name] else b"")
            assert load(tier, keys, read) == []
        assert store(tier, keys, written)
        assert load(tier, keys, read) == list(range(250))
        assert same(written, read)


def test_killed_redis_costs_misses_and_comes_back(memory: Memory, server: Redis) -> None:
    keys = [key(number) for number in range(8)]
    written, read = memory.random(layout(), 8), memory.allocate(layout(), 8)
    with tier_on(server) as tier:
        assert store(tier, keys, written)
        server.kill()
        assert look_up(tier, keys) == []
        assert load(tier, keys, read) == []
        assert not store(tier, keys, written)
        server.start()
        back = time.monotonic() + 60
        while not store(tier, keys, written) and time.monotonic() < back:  # it is asked again after a second
            time.sleep(0.1)
        assert load(tier, keys, read) == list(range(8))
        assert same(written, read)


def seconds_of_lookups(tier: Any, count: int, first: int) -> float:
    """Until the last of so many look-ups, made at once, has its answer, which is a miss."""
    start = time.monotonic()
    left = {tier.submit_lookup_and_lock_task([key(first + number)], {}) for number in range(count)}
    while left:
        assert time.monotonic() - start < 60
        left = {task for task in left if tier.query_lookup_and_lock_result(task) is None}
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.mark.timeout(300)
def test_silent_redis_holds_lookups_up_for_one_limit_and_then_not_at_all(
    memory: Memory, server: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is a second; here it is three, so that a stall of the machine is not taken for another wait."""
    for name in ("SILENT_S", "RETRY_S"):
        monkeypatch.setattr(f"patches.lmcache_admission.resp_client.{name}", LIVE_SILENT_S)
    with make_tier("resp", host="127.0.0.1", port=server.port, num_workers=4) as tier:
        assert store(tier, [key(0)], memory.random(layout(), 1))
        assert look_up(tier, [key(0)]) == [0]
        server.signal(signal.SIGSTOP)
        try:
            assert LIVE_SILENT_S <= seconds_of_lookups(tier, 32, 100) < 2 * LIVE_SILENT_S
            assert seconds_of_lookups(tier, 32, 200) < LIVE_SILENT_S
            time.sleep(LIVE_SILENT_S + 0.1)  # one finds out, the others do not wait
            assert seconds_of_lookups(tier, 32, 300) < 2 * LIVE_SILENT_S
        finally:
            server.signal(signal.SIGCONT)
        back = time.monotonic() + 60
        while look_up(tier, [key(0)]) != [0]:
            assert time.monotonic() < back
            time.sleep(0.1)
