"""Second levels of the LMCache server: each format from its own bytes after everything restarted; their failures."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.format_engines import FORMATS, HITS, Build, Engine, engine, prompt, same
from support.redis import Redis, redis_server
from support.servers import LMCacheServer, Server, connector_config, lmcache_server, running
from support.streams import Load, external_hits, until

USUAL = ("--chunk-size", "128", "--supported-transfer-mode", "auto")
TOKEN_BYTES = {"bfloat16": 1024, "float16": 1024, "fp8_e4m3": 512, "fp8_e5m2": 512}
"""KV of one token: two layers, two heads, keys and values of 64 elements."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


def tiers(*specs: dict[str, object]) -> tuple[str, ...]:
    return (*USUAL, *(word for spec in specs for word in ("--l2-adapter", json.dumps(spec))))


def on_disk(folder: Path) -> dict[str, object]:
    return {"type": "fs", "base_path": str(folder)}


def in_redis(redis: Redis) -> dict[str, object]:
    return {"type": "resp", "host": "127.0.0.1", "port": redis.port}


@pytest.fixture(params=["fs", "resp"])
def level(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, object]]:
    """A second level that outlives the LMCache server."""
    if request.param == "fs":
        yield on_disk(tmp_path / "level")
    else:
        with redis_server(tmp_path) as redis:
            yield in_redis(redis)


@contextmanager
def fresh(build: Build, level: dict[str, object], log: Path, name: str) -> Iterator[Engine]:
    """A new LMCache server with an empty first level, and a new engine of one format."""
    with lmcache_server(log, flags=tiers(level)) as cache, engine(build, cache, *FORMATS[name]) as server:
        yield server


def test_every_writer_and_every_reader_across_restarts_of_everything(
    build: Build, level: dict[str, object], tmp_path: Path
) -> None:
    """Each format stores a prompt of its own; then each gets all four, on a second level that outlived the rest."""
    answers: dict[str, list[float]] = {}
    for name in FORMATS:
        with fresh(build, level, tmp_path / f"{name}.log", name) as writer:
            answers[name] = stored(writer, name)
    for name in FORMATS:
        with fresh(build, level, tmp_path / f"{name}.log", name) as reader:
            for by in FORMATS:
                answer, hits = reader.ask(prompt=prompt(by))
                print(f"{level['type']}: {name} reads what {by} wrote: {hits} hits")
                wanted = answers[name] if by == name else reader.cold(by, prompt=prompt(by))
                assert (hits, same(answer, wanted)) == (HITS if by == name else 0, True), (by, name)
            assert reader.server.count("splint_lmcache_saved_tokens_total") == HITS


def stored(writer: Engine, name: str) -> list[float]:
    """The answer to the format's own prompt, once the second level has its KV."""
    answer, hits = writer.ask(prompt=prompt(name))
    assert (hits, same(answer, writer.cold(name, prompt=prompt(name)))) == (0, True)
    until(lambda: writer.server.count("splint_lmcache_stored_tokens_total") >= 2 * HITS, 60)
    size = writer.server.count("splint_lmcache_stored_bytes_total")
    assert size / writer.server.count("splint_lmcache_stored_tokens_total") == TOKEN_BYTES[name]
    time.sleep(2.0)  # the second level is written behind the engine's back
    return answer


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root and a kernel that lets it")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_dead_redis_and_dead_server_under_load(build: Build, small_disk: Path, tmp_path: Path) -> None:
    """The disk fills up, Redis is killed and started, then the LMCache server is, and eight clients notice nothing."""
    with redis_server(tmp_path) as redis:
        levels = tiers(on_disk(small_disk), in_redis(redis))
        with lmcache_server(tmp_path / "lmcache.log", flags=levels) as cache:
            server = build(
                "--no-enable-prefix-caching", "--kv-transfer-config", connector_config(cache.port),
                env={"SPLINT_SMOKE": "off"},
            )  # fmt: skip
            with running(server):
                server.wait_ready()
                everything_fails(server, cache, redis, small_disk)


def everything_fails(server: Server, cache: LMCacheServer, redis: Redis, disk: Path) -> None:
    load = Load(server)
    with load.running():
        until(lambda: free(disk) < 200_000, 60)
        time.sleep(3.0)
        redis.kill()
        time.sleep(5.0)
        redis.start()
        time.sleep(3.0)
        cache.kill()
        time.sleep(3.0)
        cache.start().wait_ready()
        at_return = external_hits(server)
        resumed = until(lambda: external_hits(server) > at_return + 1000, 120)
    print(
        f"{len(load.streams)} streams, longest wait {load.longest_wait_s(0.0):.2f} s, hits again after {resumed:.1f} s"
    )
    assert load.failures() == []
    assert load.wrong() == 0


def free(folder: Path) -> int:
    """Bytes that still fit."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
