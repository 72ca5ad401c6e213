"""The LMCache server killed, stopped and started again while eight clients stream from a real engine."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from support.servers import LMCacheServer, Server, connector_config, free_port, lmcache_server

CLIENTS = 8
ANSWER_TOKENS = 24
PROMPT_TOKENS = 900
AWAY_S = 8.0
# Beyond what the same clients wait for while no prompt is known and another LMCache server starts beside the engine:
# without its cache an engine computes every prompt, and the start of a server takes a core of two for many seconds.
# Stock hangs for 60 s and more.
MOST_EXTRA_S = 2.0


@dataclass
class Stream:
    """One streamed completion: when each token came, in seconds, and what it was."""

    start: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    failure: str = ""

    @property
    def end(self) -> float:
        return self.arrivals[-1] if self.arrivals else self.start

    def longest_wait_s(self) -> float:
        points = [self.start, *self.arrivals]
        return max((later - earlier for earlier, later in pairwise(points)), default=float("inf"))


def prompt(seed: str) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(10, 400) for _ in range(PROMPT_TOKENS)]


def lines(answer: httpx.Response) -> Iterator[bytes]:
    """Lines of an event stream. ``iter_lines`` also breaks at characters that a random model may well say (U+0085)."""
    rest = b""
    for chunk in answer.iter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


def complete(server: Server, token_ids: list[int]) -> Stream:
    body = {
        "model": "tiny", "prompt": token_ids, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "stream": True, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    stream = Stream(time.monotonic())
    try:
        with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=60) as answer:
            for line in lines(answer):
                if line.startswith(b"data: {"):
                    stream.tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                    stream.arrivals.append(time.monotonic())
    except (httpx.HTTPError, KeyError) as error:
        stream.failure = repr(error)
    if len(stream.tokens) != ANSWER_TOKENS:
        stream.failure = stream.failure or f"{len(stream.tokens)} of {ANSWER_TOKENS} tokens"
    return stream


class Load:
    """Eight clients. Of the prompts two in three are known (look-up and load), the third is new (store)."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.known = [prompt(f"known {n}") for n in range(12)]
        self.right = [complete(server, token_ids).tokens for token_ids in self.known]
        self.streams: list[tuple[int | None, Stream]] = []
        self._stop = threading.Event()
        self._only_new = threading.Event()

    @contextmanager
    def only_new(self) -> Iterator[None]:
        """No prompt is known for a while: nothing is loaded, everything is computed (and stored)."""
        self._only_new.set()
        yield
        self._only_new.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _client(self, number: int) -> None:
        chosen = random.Random(number)
        round_ = 0
        while not self._stop.is_set():
            round_ += 1
            new = round_ % 3 == 0 or self._only_new.is_set()
            known = None if new else chosen.randrange(len(self.known))
            token_ids = prompt(f"new {number} {round_} {time.time()}") if known is None else self.known[known]
            self.streams.append((known, complete(self.server, token_ids)))

    def longest_wait_s(self, since: float, until: float = float("inf")) -> float:
        """The longest wait for a first or a next token in streams that ran between the two moments."""
        return max(
            (
                stream.longest_wait_s()
                for _, stream in list(self.streams)
                if stream.end >= since and stream.start <= until
            ),
            default=0.0,
        )

    def wrong(self) -> int:
        return sum(known is not None and stream.tokens != self.right[known] for known, stream in self.streams)

    def failures(self) -> list[str]:
        return [stream.failure for _, stream in self.streams if stream.failure]


def external_hits(server: Server) -> float:
    answer = server.get("/metrics")
    assert answer is not None
    return sum(
        float(value)
        for value in re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", answer.text, re.MULTILINE)
    )


def until(true: Callable[[], bool], limit_s: float) -> float:
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < limit_s, f"not so after {limit_s:g} s"
        time.sleep(0.1)
    return time.monotonic() - start


@contextmanager
def killed(cache: LMCacheServer) -> Iterator[None]:
    cache.kill(signal.SIGKILL)
    yield
    cache.start()
    cache.wait_ready()


@contextmanager
def stopped(cache: LMCacheServer) -> Iterator[None]:
    assert cache.process is not None
    os.kill(cache.process.pid, signal.SIGSTOP)
    yield
    os.kill(cache.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("away", [killed, pytest.param(stopped, marks=pytest.mark.full)])
def test_requests_go_on_without_the_lmcache_server_and_caching_resumes(
    serve: Callable[..., Server], tmp_path: Path, away: Callable[[LMCacheServer], object]
) -> None:
    with lmcache_server(tmp_path / "lmcache.log") as cache:
        # Without vLLM's own prefix cache every known prompt is looked up in LMCache and loaded from it.
        server = serve("--no-enable-prefix-caching", "--kv-transfer-config", connector_config(cache.port))
        load = Load(server)
        with load.running():
            time.sleep(6.0)
            undisturbed = load.longest_wait_s(0.0)
            uncached = time.monotonic()
            with load.only_new(), lmcache_server(tmp_path / "control.log"):
                time.sleep(4.0)
            cold = load.longest_wait_s(uncached)
            time.sleep(3.0)
            began = time.monotonic()
            assert external_hits(server) > 0
            with away(cache):  # type: ignore[attr-defined]
                time.sleep(AWAY_S)
                at_return = external_hits(server)
                absent = load.longest_wait_s(began)
            resumed = until(lambda: external_hits(server) > at_return + 1000, 30.0)
            time.sleep(3.0)
        disturbed = load.longest_wait_s(began)
        print(
            f"longest wait {undisturbed:.2f} s, without hits {cold:.2f} s, in the outage {absent:.2f} s,"
            f" with the return {disturbed:.2f} s;"
            f" hits again after {resumed:.1f} s"
        )
        assert load.failures() == []
        assert load.wrong() == 0
        assert disturbed < max(undisturbed, cold) + MOST_EXTRA_S
        assert server.text().count("answers again; caching resumes") <= 2  # the scheduler's link and the worker's


@pytest.mark.parametrize(
    ("flags", "found", "remedy"),
    [
        (("--chunk-size", "128"), "not to the registration", "--supported-transfer-mode auto"),
        (("--chunk-size", "96", "--supported-transfer-mode", "auto"), "has chunk size 96", "--chunk-size 256"),
    ],
)
def test_wrongly_started_server_is_refused_with_the_command_that_starts_it_right(
    build: Callable[..., Server], tmp_path: Path, flags: tuple[str, ...], found: str, remedy: str
) -> None:
    with lmcache_server(tmp_path / "lmcache.log", flags=flags) as cache:
        refused(build("--kv-transfer-config", connector_config(cache.port)), found, remedy)


def test_absent_server_is_refused_within_the_start_limit(build: Callable[..., Server]) -> None:
    port = free_port()
    server = build("--kv-transfer-config", connector_config(port), env={"SPLINT_LMCACHE_START_TIMEOUT_S": "3"})
    refused(server, "no LMCache server answered", f"lmcache server --host 127.0.0.1 --port {port}")


def refused(server: Server, found: str, remedy: str) -> None:
    server.start()
    try:
        code = server.wait_end(150)
    finally:
        server.kill_session()
    assert (code, found in server.text(), remedy in server.text()) == (78, True, True), server.tail()
