"""A small engine behind real HTTP that speaks the OpenAI API and counts as vLLM does; its faults are switches."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from entrypoint.smoke.checks.parallel import AT_ONCE, COMPARED
from patches.serving_gate.plan import SmokePlan

__all__ = ["BLOCK", "CHUNK", "PLAN", "SECRET", "Engine", "listening"]

BLOCK = 16
CHUNK = 32
SECRET = "open-sesame"


@dataclass
class Engine:
    """Log-probabilities are a function of the tokens; caches only count. Faults are switches."""

    ranks: int = 2
    prefix: list[set[str]] = field(init=False)
    external: set[str] = field(default_factory=set)
    counters: Counter[tuple[str, int]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_once: threading.Barrier = field(default_factory=lambda: threading.Barrier(AT_ONCE))
    chat_template: bool = True
    counts: bool = True
    max_logprobs: int = 20
    keeps_prefixes: bool = True
    stores_after: int = 0
    wrong_on: str = ""
    invents_hits: bool = False
    logprob_shift: float = 0.0
    broken_stream: bool = False
    other_rank: bool = False
    unaddressed: int = 0
    ignores_prompt: bool = False
    ignores_stop: bool = False
    cuts_prompts_at: int = 0
    takes_any_length: bool = False
    mixes_up: bool = False
    nan_after: int = 10**9
    shifted_rank: int | None = None
    forgets_logprobs: bool = False
    silent: bool = False
    plain: bool = False
    miscounts: bool = False
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    context: int = 512
    before: int = 0
    crowd: list[list[int]] = field(default_factory=list)
    turn: int = 0
    names: tuple[str, ...] = ("tiny",)

    def __post_init__(self) -> None:
        self.prefix = [set() for _ in range(self.ranks)]

    def source(self, rank: int, key: str) -> str:
        """Where the prompt's first part comes from; counts it as vLLM does."""
        if key in self.prefix[rank] and self.keeps_prefixes:
            return "prefix"
        if key in self.external:
            return "external"
        return "cold"

    def complete(self, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        prompt, length, top = body["prompt"], body["max_tokens"], body.get("logprobs") or 0
        if self.cuts_prompts_at:
            prompt = prompt[-self.cuts_prompts_at :]
        cached = len(prompt) // CHUNK * CHUNK
        key = json.dumps([body.get("cache_salt"), prompt[:cached]])
        if self.other_rank:
            rank = 0
        with self.lock:
            source = self.source(rank, key)
            moved = {"prefix": "prefix_cache_hits", "external": "external_prefix_cache_hits"}.get(source)
            if moved and cached:
                self.counters[moved, rank] += cached
            if self.invents_hits:
                self.counters["prefix_cache_hits", rank] += BLOCK
            self.counters["request_success", rank] += 1
            self.counters["prompt_tokens", rank] += len(prompt)
            self.prefix[rank].add(key)
            self.stores_after -= 1
            if self.stores_after < 0:
                self.external.add(key)
        tokens, steps = list(self.of_whom(prompt)), []
        for step in range(length):
            steps.append(self.distribution(tokens, top, wrong=self.wrong(source, step)))
            if rank == self.shifted_rank:
                steps[-1] = {token: value + 10.0 for token, value in steps[-1].items()}
            tokens.append(max(steps[-1], key=steps[-1].__getitem__))
        generated = tokens[len(prompt) :]
        text, finish_reason = self.text(generated, body.get("stop"))
        named = [{f"token_id:{token}": value for token, value in step.items()} for step in steps]
        return {
            "id": "x", "object": "text_completion", "created": 0, "model": "tiny",
            "choices": [{
                "index": 0, "text": text, "finish_reason": finish_reason, "token_ids": generated,
                "logprobs": None if self.forgets_logprobs else {
                    "top_logprobs": named, "tokens": [], "text_offset": [],
                    "token_logprobs": [float("nan") if len(prompt) > self.nan_after else max(step.values())
                                       for step in steps],
                },
            }],
            "usage": _usage(len(prompt), length),
        }  # fmt: skip

    def of_whom(self, prompt: list[int]) -> list[int]:
        """The prompt, or where answers are mixed up that of another of the requests that are made at once."""
        if not self.mixes_up:
            return prompt
        with self.lock:
            if self.before < COMPARED:
                self.before += 1
                return prompt
            place = len(self.crowd)
            self.crowd.append(prompt)
        self.at_once.wait(30)
        return self.crowd[(place + 1) % AT_ONCE]

    def text(self, generated: list[int], stop: str | None) -> tuple[str, str]:
        """One letter a token, up to the stop string, and the finish reason."""
        text = "".join(chr(ord("A") + token % 26) for token in generated)
        if stop is None or stop not in text or self.ignores_stop:
            return text, "length"
        return text[: text.index(stop)], "stop"

    def pool(self) -> None:
        """Count a request on the rank whose turn it is, as a load balancer would."""
        with self.lock:
            self.turn = (self.turn + 1) % (1 if self.other_rank else self.ranks)
            self.counters["request_success", self.turn] += 1

    def wrong(self, source: str, step: int) -> bool:
        if self.wrong_on == "chance":
            return random.random() < 0.5
        return self.wrong_on == source or (self.wrong_on == "decode" and step > 0)

    def distribution(self, tokens: list[int], top: int, *, wrong: bool) -> dict[int, float]:
        source = random.Random("" if self.ignores_prompt else json.dumps([tokens, wrong]))
        values = sorted((source.gauss(-6.0, 0.5) for _ in range(64)), reverse=True)
        ids = source.sample(range(64), 64)
        return {
            token: value + self.logprob_shift for token, value in list(zip(ids, values, strict=True))[: max(top, 1)]
        }


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, body: Any, status: int = 200, kind: str = "application/json") -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        if self.engine.plain:
            data = re.sub(rb', "token_ids": \[[^]]*\]', b"", data)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, message: str, status: int = 400) -> None:
        self._send({"error": {"message": message, "code": status}}, status)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            more = {} if self.engine.plain else {"max_model_len": self.engine.context}
            models = [{"id": name, "object": "model", **more} for name in self.engine.names]
            self._send({"object": "list", "data": models})
        elif self.engine.plain:
            self._send({"detail": "Not Found"}, 404)
        elif self.engine.counts:
            rows = [f'vllm:{name}_total{{engine="{rank}"}} {n}' for (name, rank), n in self.engine.counters.items()]
            self._send("\n".join(['vllm:request_success_total{engine="0"} 0', *rows]) + "\n", kind="text/plain")
        else:
            self._send("process_open_fds 1\n", kind="text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        foreign = sorted({"cache_salt", "return_token_ids", "ignore_eos"} & set(body)) if self.engine.plain else []
        if foreign:
            self._error(f"Unrecognized request argument supplied: {foreign[0]}")
        elif self.path == "/v1/completions":
            self._completions(body)
        elif self.path == "/v1/chat/completions":
            self._chat(body)
        elif self.path == "/splint/control/reset_prefix_cache" and self.headers["x-splint-smoke"] == SECRET:
            for prefix in self.engine.prefix:
                prefix.clear()
            self._send({"reset": True})
        elif self._control() in self.engine.answers and self.headers["x-splint-smoke"] == SECRET:
            self._send({"engines": self.engine.answers[self._control()]})
        elif self.path == "/pooling":
            self.engine.pool()
            self._send({"data": [{"data": [[0.25, -0.5], [float("nan") if self.engine.wrong_on else 1.0, 0.0]]}]})
        else:
            self._send({"detail": "Not Found"}, 404)

    def _control(self) -> str:
        return self.path.removeprefix("/splint/control/")

    def _completions(self, body: dict[str, Any]) -> None:
        if len(body["prompt"]) + body["max_tokens"] > self.engine.context and not self.engine.takes_any_length:
            self._error(f"This model's maximum context length is {self.engine.context} tokens")
        elif (body.get("logprobs") or 0) > self.engine.max_logprobs:
            self._error(f"Requested sample logprobs of {body['logprobs']}, which is greater than max allowed: "
                        f"{self.engine.max_logprobs}")  # fmt: skip
        else:
            self._send(
                self.engine.complete(int(self.headers.get("X-data-parallel-rank") or self.engine.unaddressed), body)
            )

    def _chat(self, body: dict[str, Any]) -> None:
        if not self.engine.chat_template:
            self._error("default chat template is no longer allowed, so you must provide a chat template")
        elif body.get("stream"):
            self._stream()
        else:
            message = {"role": "assistant", "content": "one two"}
            tokens = [] if self.engine.silent else [5, 6]
            choice = {"index": 0, "finish_reason": "length", "message": message, "token_ids": tokens}
            self._send({"id": "x", "object": "chat.completion", "created": 0, "model": "tiny", "choices": [choice],
                        "usage": _usage(4, 3 if self.engine.miscounts else 2)})  # fmt: skip

    def _stream(self) -> None:
        common = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "tiny"}
        last = "tow" if self.engine.broken_stream else "two"
        pieces = [("one ", [5], None), (last, [6], "length")]
        chunks: list[dict[str, Any]] = [
            {**common, "choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids, "finish_reason": end}]}
            for text, ids, end in pieces
        ]
        chunks.append({**common, "choices": [], "usage": _usage(4, 2)})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._send("".join([*lines, "data: [DONE]\n\n"]), kind="text/event-stream")


PLAN = SmokePlan(
    base_url="", secret=SECRET, model="tiny", runner="generate", max_model_len=512, block_size=BLOCK, vocab_size=512,
    prefix_caching=True, dp_ranks=(0, 1), cache_dtype="auto", expected_roster=(), connector="LMCacheMPConnector",
    connectors=("LMCacheMPConnector",),
    kv_role="kv_both", chunk_tokens=CHUNK, timeout_s=30.0,
)  # fmt: skip


class _Server(ThreadingHTTPServer):
    # Connections that come at once must not wait for a second SYN, which the kernel sends after a second.
    request_queue_size = 64


@contextmanager
def listening(engine: Engine) -> Iterator[str]:
    handler = type("Bound", (Handler,), {"engine": engine})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
