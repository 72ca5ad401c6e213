"""Eight clients that stream from a real engine: some prompts known, some new, every token timed."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from support.servers import Server

__all__ = ["CLIENTS", "Load", "Stream", "complete", "external_hits", "prompt", "until"]

CLIENTS = 8
ANSWER_TOKENS = 24
PROMPT_TOKENS = 900


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


def prompt(seed: str, count: int = PROMPT_TOKENS) -> list[int]:
    """``count`` token ids, the same for the same seed."""
    chosen = random.Random(seed)
    return [chosen.randrange(10, 400) for _ in range(count)]


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

    def __init__(self, server: Server, prompt_tokens: int = PROMPT_TOKENS) -> None:
        self.server = server
        self.prompt_tokens = prompt_tokens
        self.known = [prompt(f"known {n}", prompt_tokens) for n in range(12)]
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
            token_ids = (
                prompt(f"new {number} {round_} {time.time()}", self.prompt_tokens)
                if known is None
                else self.known[known]
            )
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
    """Prompt tokens that came from LMCache so far."""
    return server.count("vllm:external_prefix_cache_hits_total")


def until(true: Callable[[], bool], limit_s: float) -> float:
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < limit_s, f"not so after {limit_s:g} s"
        time.sleep(0.1)
    return time.monotonic() - start
