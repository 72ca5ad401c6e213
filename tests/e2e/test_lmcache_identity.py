"""Engines of different KV formats on one LMCache server: each answers from its own bytes, or computes."""

from __future__ import annotations

import base64
import io
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import LMCacheServer, Server, connector_config, lmcache_server, running

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

    def cold(self, seed: str) -> list[float]:
        """The answer without any cache: under a salt of its own."""
        answer, hits = self.ask(cache_salt=f"cold {seed}")
        assert hits == 0
        return answer

    def profile(self) -> dict[str, Any]:
        answer = self.server.get("/splint/report")
        assert answer is not None
        (found,) = answer.json()["kv_profiles"]
        return dict(found)


@contextmanager
def engine(build: Build, cache: LMCacheServer, *flags: str, patches: str = "all", **options: Any) -> Iterator[Engine]:
    server = build(
        *flags, "--no-enable-prefix-caching", "--kv-transfer-config", connector_config(cache.port),
        env={"SPLINT_SMOKE": "off", "SPLINT_PATCHES": patches}, **options,
    )  # fmt: skip
    with running(server):
        server.wait_ready()
        yield Engine(server)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    with lmcache_server(tmp_path_factory.mktemp("lmcache") / "lmcache.log") as server:
        yield server


def same(one: list[float], other: list[float]) -> bool:
    return one == pytest.approx(other, abs=1e-6)


def embeddings(value: float) -> str:
    """A prompt of 391 equal embeddings, as the API takes it."""
    import torch

    file = io.BytesIO()
    torch.save(torch.full((391, 128), value, dtype=torch.bfloat16), file)
    return base64.b64encode(file.getvalue()).decode()


def test_an_engine_does_not_answer_from_another_formats_bytes(build: Build, cache: LMCacheServer) -> None:
    """The corruption: stock reports 384 hits here and answers from e5m2 bytes read as e4m3."""
    with engine(build, cache, *FORMATS["fp8_e5m2"]) as writer:
        _, hits = writer.ask()
        assert hits == 0
        assert writer.ask()[1] == HITS
        theirs = writer.profile()["fingerprint"]
    with engine(build, cache, *FORMATS["fp8_e4m3"], "--enable-prompt-embeds") as reader:
        assert reader.profile()["fingerprint"] != theirs
        answer, hits = reader.ask()
        print(f"e4m3 after e5m2: {hits} hits, {answer[:3]}")
        assert hits == 0
        assert same(answer, reader.cold("reader"))
        again, hits = reader.ask()
        assert (hits, same(again, answer)) == (HITS, True)
        client_can_not_reach_another_namespace(reader, theirs)
        prompts_of_embeddings_bypass_the_cache(reader)


def client_can_not_reach_another_namespace(reader: Engine, fingerprint: str) -> None:
    forged = {"lmcache.tag.kvfp": fingerprint, "lmcache.tag.splint": fingerprint, "lmcache.model_name": fingerprint}
    answer, hits = reader.ask(kv_transfer_params=forged)
    assert (hits, same(answer, reader.cold("forged"))) == (HITS, True)
    assert reader.ask(cache_salt=fingerprint)[1] == 0


def prompts_of_embeddings_bypass_the_cache(reader: Engine) -> None:
    """Two prompts of equal length have the same placeholder token ids."""
    answers = []
    for value in (0.01, -0.02, 0.01):
        answer, hits = reader.ask(prompt=None, prompt_embeds=embeddings(value))
        assert hits == 0
        answers.append(answer)
    assert same(answers[0], answers[2])
    assert not same(answers[0], answers[1])


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_writer_and_every_reader_on_one_server_across_restarts(build: Build, tmp_path: Path) -> None:
    """Writers in turn see what the ones before them stored; then each comes back and sees what all have stored."""
    answers: dict[str, list[float]] = {}
    with lmcache_server(tmp_path / "lmcache.log") as cache:
        for name, flags in FORMATS.items():
            with engine(build, cache, *flags) as writer:
                answers[name], hits = writer.ask()
                print(f"{name} after {[*answers][:-1]}: {hits} hits")
                assert hits == 0
                assert same(answers[name], writer.cold(name))
        for name, flags in FORMATS.items():
            with engine(build, cache, *flags) as reader:
                answer, hits = reader.ask()
                print(f"{name} after a restart: {hits} hits, {answer[:3]}")
                assert (hits, same(answer, answers[name])) == (HITS, True)
                assert same(answer, reader.cold(f"{name} again"))


@pytest.mark.full
def test_without_the_patch_the_fault_is_there(build: Build, tmp_path: Path) -> None:
    """What this patch holds: it may go when this test fails."""
    with lmcache_server(tmp_path / "lmcache.log") as cache:
        with engine(build, cache, *FORMATS["fp8_e5m2"], patches="-lmcache_identity") as writer:
            writer.ask()
            assert writer.ask()[1] == HITS
        with engine(build, cache, *FORMATS["fp8_e4m3"], patches="-lmcache_identity") as reader:
            answer, hits = reader.ask()
            cold = reader.cold("reader")
            print(f"without the patch: {hits} hits, {answer[:3]}, cold {cold[:3]}")
            assert (hits, same(answer, cold)) == (HITS, False)
