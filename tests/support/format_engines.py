"""Engines of different KV formats on one LMCache server, and one prompt to ask them all."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from support.servers import LMCacheServer, Server, connector_config, running

__all__ = ["FORMATS", "HITS", "Build", "Engine", "engine", "prompt", "same"]

HITS = 384
"""Tokens of the prompt that fill whole chunks of 128."""

FORMATS = {
    "bfloat16": (),
    "float16": ("--dtype", "float16"),
    "fp8_e4m3": ("--kv-cache-dtype", "fp8_e4m3"),
    "fp8_e5m2": ("--kv-cache-dtype", "fp8_e5m2"),
}
Build = Callable[..., Server]


def prompt(seed: str = "shared") -> list[int]:
    """391 token ids, the same for the same seed."""
    chosen = random.Random(seed)
    return [chosen.randrange(10, 400) for _ in range(391)]


class Engine:
    """A running engine without a prefix cache of its own: every prompt is looked up in LMCache."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(self, **fields: Any) -> tuple[list[float], int]:
        """Log-probabilities of eight greedy tokens, and how many tokens came from LMCache."""
        before = self._hits()
        body = {"model": "tiny", "prompt": prompt(), "max_tokens": 8, "temperature": 0, "logprobs": 1, **fields}
        answer = httpx.post(f"{self.server.base_url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["token_logprobs"], self._hits() - before

    def _hits(self) -> int:
        answer = self.server.get("/metrics")
        assert answer is not None
        found = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", answer.text, re.MULTILINE)
        return int(sum(map(float, found)))

    def cold(self, seed: str, **fields: Any) -> list[float]:
        """The answer without any cache: under a salt of its own."""
        answer, hits = self.ask(cache_salt=f"cold {seed}", **fields)
        assert hits == 0
        return answer

    def fingerprint(self) -> str:
        """The fingerprint in the report, the same in engine core and worker."""
        answer = self.server.get("/splint/report")
        assert answer is not None
        (shown,) = answer.json()["kv_profiles"]
        facts = {entry["role"]: entry["facts"] for entry in answer.json()["processes"]}
        told = {facts[role]["kv_profile"]["digest"] for role in ("engine_core", "worker")}
        assert told == {shown["digest"]}
        return str(shown["fingerprint"])


@contextmanager
def engine(
    build: Build, cache: LMCacheServer, *flags: str, patches: str = "all", mode: str = "auto", **options: Any
) -> Iterator[Engine]:
    """An engine on ``cache``, open for traffic; ``mode`` is LMCache's name of who copies."""
    connector = connector_config(cache.port, {"lmcache.mp.mp_transfer_mode": mode})
    server = build(
        *flags, "--no-enable-prefix-caching", "--kv-transfer-config", connector,
        env={"SPLINT_SMOKE": "off", "SPLINT_PATCHES": patches}, **options,
    )  # fmt: skip
    with running(server):
        server.wait_ready()
        yield Engine(server)


def same(one: list[float], other: list[float]) -> bool:
    return one == pytest.approx(other, abs=1e-6)
