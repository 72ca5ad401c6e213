"""A second level on disk, damaged behind the LMCache server's back: the engine computes, and answers as before."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from support.redis import Redis, redis_server
from support.servers import LMCacheServer, Server, connector_config, free_port, running

CHUNKS = 3
CHUNK = 128
Build = Callable[..., Server]


class Files:
    """A second level in a folder."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder / kind
        self.spec = {"type": kind, "base_path": str(self.folder)}

    def objects(self) -> list[Path]:
        """In any order."""
        return sorted(self.folder.glob("*.data"))

    def damage(self, stored: Path) -> None:
        stored.write_bytes(flipped(stored.read_bytes()))


class Values:
    """A second level in Redis."""

    def __init__(self, server: Redis) -> None:
        self.client = redis.Redis(port=server.port)
        self.spec = {"type": "resp", "host": "127.0.0.1", "port": server.port}

    def objects(self) -> list[bytes]:
        """In any order."""
        return sorted(found for found in self.client.keys("*") if isinstance(found, bytes))

    def damage(self, stored: bytes) -> None:
        content = self.client.get(stored)
        assert isinstance(content, bytes)
        self.client.set(stored, flipped(content))


def flipped(content: bytes) -> bytes:
    """One bit of it."""
    place = len(content) // 3
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


class Cache:
    """An LMCache server that is started anew, with an empty first level, on the same second level."""

    def __init__(self, folder: Path, second: Files | Values) -> None:
        flags = (
            "--chunk-size",
            str(CHUNK),
            "--supported-transfer-mode",
            "auto",
            "--l2-adapter",
            json.dumps(second.spec),
        )
        self.second = second
        self.server = LMCacheServer(free_port(), free_port(), folder / "lmcache.log", flags)

    def restart(self) -> None:
        if self.server.process is not None:
            self.server.kill()
        self.server.start().wait_ready()

    def stored(self) -> list[Any]:
        """The objects, once they are all there."""
        deadline = time.monotonic() + 120
        while len(found := self.second.objects()) < CHUNKS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {CHUNKS} objects")
            time.sleep(0.1)
        return found


def ask(server: Server) -> tuple[list[float], int]:
    """Log-probabilities of eight greedy tokens, and how many tokens came from LMCache."""
    chosen = random.Random("second level")
    prompt = [chosen.randrange(10, 400) for _ in range(CHUNKS * CHUNK + 7)]
    before = hits(server)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"], hits(server) - before


def hits(server: Server) -> int:
    answer = server.get("/metrics")
    assert answer is not None
    lines = answer.text.splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total"))
    )


def after_return(server: Server) -> tuple[list[float], int]:
    """The first answer that LMCache had a part in, or the last of those without one."""
    for _ in range(40):
        found = ask(server)
        if found[1]:
            return found
        time.sleep(0.5)
    return found


@pytest.fixture(params=["fs", "fs_native", "resp"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files | Values]:
    if request.param != "resp":
        yield Files(tmp_path, request.param)
        return
    with redis_server(tmp_path) as server:
        values = Values(server)
        yield values
        values.client.close()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_second_level_survives_restarts_and_gives_nothing_damaged(
    build: Build, second: Files | Values, tmp_path: Path
) -> None:
    cache = Cache(tmp_path, second)
    cache.restart()
    server = build(
        "--no-enable-prefix-caching", "--kv-cache-dtype", "fp8_e4m3", "--kv-transfer-config",
        connector_config(cache.server.port), env={"SPLINT_SMOKE": "off"},
    )  # fmt: skip
    try:
        with running(server):
            server.wait_ready()
            cold, none = ask(server)
            objects: list[Any] = cache.stored()
            cache.restart()
            warm, whole = after_return(server)
            second.damage(objects[1])
            cache.restart()
            computed, left = after_return(server)
            print(f"{second.spec['type']}: cold {none}, after a restart {whole}, with one chunk damaged {left} hits")
        assert (none, whole) == (0, CHUNKS * CHUNK)
        assert left in {0, CHUNK, 2 * CHUNK}, "the chunks before the damaged one, whichever that is"
        assert warm == pytest.approx(cold, abs=1e-6)
        assert computed == pytest.approx(cold, abs=1e-6)
    finally:
        cache.server.kill()
