"""A second level on disk, damaged behind the LMCache server's back: the engine computes, and answers as before."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import LMCacheServer, Server, connector_config, free_port, running

CHUNKS = 3
CHUNK = 128
Build = Callable[..., Server]


class Cache:
    """An LMCache server that is started anew, with an empty first level, on the same folder."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        tier = json.dumps({"type": kind, "base_path": str(folder / kind)})
        flags = ("--chunk-size", str(CHUNK), "--supported-transfer-mode", "auto", "--l2-adapter", tier)
        self.files = folder / kind
        self.server = LMCacheServer(free_port(), free_port(), folder / "lmcache.log", flags)

    def restart(self) -> None:
        if self.server.process is not None:
            self.server.kill()
        self.server.start().wait_ready()

    def stored(self) -> list[Path]:
        """The files, once they are all there."""
        deadline = time.monotonic() + 20
        while len(found := sorted(self.files.glob("*.data"))) < CHUNKS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {CHUNKS} files")
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


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fs", "fs_native"])
def test_second_level_survives_restarts_and_gives_nothing_damaged(build: Build, kind: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path, kind)
    cache.restart()
    server = build(
        "--no-enable-prefix-caching", "--kv-cache-dtype", "fp8_e4m3", "--kv-transfer-config",
        connector_config(cache.server.port), env={"SPLINT_SMOKE": "off"},
    )  # fmt: skip
    try:
        with running(server):
            server.wait_ready()
            cold, none = ask(server)
            files = cache.stored()
            cache.restart()
            warm, whole = after_return(server)
            damage(files)
            cache.restart()
            seen: list[Any] = [after_return(server)]
            print(f"{kind}: cold {none}, after a restart {whole}, with the second chunk damaged {seen[0][1]} hits")
        assert (none, whole, seen[0][1]) == (0, CHUNKS * CHUNK, CHUNK)
        assert warm == pytest.approx(cold, abs=1e-6)
        assert seen[0][0] == pytest.approx(cold, abs=1e-6)
    finally:
        cache.server.kill()


def damage(files: list[Path]) -> None:
    """Flip one bit of the second chunk: the one that was written second."""
    second = sorted(files, key=lambda file: file.stat().st_mtime_ns)[1]
    content = bytearray(second.read_bytes())
    content[len(content) // 3] ^= 1
    second.write_bytes(content)
