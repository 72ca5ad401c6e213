"""The checks against a small engine over real HTTP: an honest one passes, and each dishonesty is caught by name."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from entrypoint.smoke import battery
from entrypoint.smoke.check import Check, Context
from entrypoint.smoke.checks import CHECKS
from entrypoint.smoke.server import Server
from patches.framework import rundir
from patches.serving_gate.plan import CheckResult, SmokePlan

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
    ignores_prompt: bool = False
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
        prompt, length, top = body["prompt"], body["max_tokens"], body["logprobs"]
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
        tokens, steps = list(prompt), []
        for step in range(length):
            steps.append(self.distribution(tokens, top, wrong=self.wrong(source, step)))
            tokens.append(max(steps[-1], key=steps[-1].__getitem__))
        generated = tokens[len(prompt) :]
        named = [{f"token_id:{token}": value for token, value in step.items()} for step in steps]
        return {
            "id": "x", "object": "text_completion", "created": 0, "model": "tiny",
            "choices": [{
                "index": 0, "text": "", "finish_reason": "length", "token_ids": generated,
                "logprobs": {"top_logprobs": named, "tokens": [], "token_logprobs": [], "text_offset": []},
            }],
        }  # fmt: skip

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
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, message: str, status: int = 400) -> None:
        self._send({"error": {"message": message, "code": status}}, status)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send({"object": "list", "data": [{"id": name, "object": "model"} for name in self.engine.names]})
        elif self.engine.counts:
            rows = [f'vllm:{name}_total{{engine="{rank}"}} {n}' for (name, rank), n in self.engine.counters.items()]
            self._send("\n".join(['vllm:request_success_total{engine="0"} 0', *rows]) + "\n", kind="text/plain")
        else:
            self._send("process_open_fds 1\n", kind="text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            self._completions(body)
        elif self.path == "/v1/chat/completions":
            self._chat(body)
        elif self.path == "/splint/control/reset_prefix_cache" and self.headers["x-splint-smoke"] == SECRET:
            for prefix in self.engine.prefix:
                prefix.clear()
            self._send({"reset": True})
        elif self.path == "/pooling":
            self.engine.pool()
            self._send({"data": [{"data": [[0.25, -0.5], [float("nan") if self.engine.wrong_on else 1.0, 0.0]]}]})
        else:
            self._send({"detail": "Not Found"}, 404)

    def _completions(self, body: dict[str, Any]) -> None:
        if body["logprobs"] > self.engine.max_logprobs:
            self._error(f"Requested sample logprobs of {body['logprobs']}, which is greater than max allowed: "
                        f"{self.engine.max_logprobs}")  # fmt: skip
        else:
            self._send(self.engine.complete(int(self.headers.get("X-data-parallel-rank") or 0), body))

    def _chat(self, body: dict[str, Any]) -> None:
        if not self.engine.chat_template:
            self._error("default chat template is no longer allowed, so you must provide a chat template")
        elif body.get("stream"):
            self._stream()
        else:
            message = {"role": "assistant", "content": "one two"}
            choice = {"index": 0, "finish_reason": "length", "message": message, "token_ids": [5, 6]}
            self._send({"id": "x", "object": "chat.completion", "created": 0, "model": "tiny", "choices": [choice],
                        "usage": _usage(4, 2)})  # fmt: skip

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
    kv_role="kv_both", chunk_tokens=CHUNK, timeout_s=30.0,
)  # fmt: skip


@contextmanager
def listening(engine: Engine) -> Iterator[str]:
    handler = type("Bound", (Handler,), {"engine": engine})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


Run = Callable[..., dict[str, CheckResult]]


@pytest.fixture
def run() -> Run:
    """Run the battery, or the named checks, against ``engine``; returns the results by check."""

    def run(engine: Engine, *names: str, secret_passes: bool = True, **changes: Any) -> dict[str, CheckResult]:
        with listening(engine) as url:
            plan = replace(PLAN, base_url=url, dp_ranks=tuple(range(engine.ranks)), **changes)
            server = Server(plan)
            chosen = [check for check in CHECKS if not names or check.id in names]
            verdict = battery.run(Context(plan, server, secret_passes=secret_passes), chosen)
            server.close()
        return {result.id: result for result in verdict.checks}

    return run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_honest_server_passes_every_check_that_applies(run: Run, ranks: int) -> None:
    results = run(Engine(ranks=ranks))
    assert {name: result.status for name, result in results.items()} == {
        "models": "passed", "roster": "skipped", "kv_budget": "skipped", "chat": "passed", "stream": "passed",
        "logprobs": "passed", "pooling": "skipped", "dp_ranks": "passed", "kv_series": "passed",
    }  # fmt: skip


def test_the_series_names_tokens_and_differences_by_rank(run: Run) -> None:
    evidence = run(Engine(), "kv_series")["kv_series"].evidence
    assert evidence["prefix_hit_tokens"] == {"0": 64, "1": 64}
    assert evidence["external_hit_tokens"] == {"0": 64, "1": 64}
    assert evidence["external_hit"] == {"0": 0.0, "1": 0.0}
    assert evidence["decode"] == {"0": 0.0, "1": 0.0}
    assert evidence["signal"] > evidence["tolerance"] > 0


@pytest.mark.parametrize(
    ("fault", "part"), [("prefix", "prefix_hit"), ("external", "external_hit"), ("decode", "decoded")]
)
def test_wrong_values_from_a_cache_are_caught_where_they_come_from(run: Run, fault: str, part: str) -> None:
    result = run(Engine(wrong_on=fault), "kv_series")["kv_series"]
    assert result.status == "failed"
    assert part in result.reason
    assert "Do not serve" in result.reason


def test_an_engine_that_is_wrong_by_chance_is_not_taken_for_a_noisy_one(run: Run) -> None:
    result = run(Engine(wrong_on="chance"), "kv_series")["kv_series"]
    assert (result.status, "Do not serve" in result.reason) == ("failed", True)


def test_a_model_that_ignores_its_prompt_is_served_and_the_verdict_says_so(run: Run) -> None:
    result = run(Engine(ignores_prompt=True), "kv_series")["kv_series"]
    assert (result.status, result.evidence["comparison"][:8]) == ("passed", "not made")


def test_a_cache_that_takes_one_prompt_for_another_is_caught(run: Run) -> None:
    result = run(Engine(invents_hits=True), "kv_series")["kv_series"]
    assert "never sent before" in result.reason


def test_a_prefix_cache_whose_counter_does_not_move_fails(run: Run) -> None:
    result = run(Engine(keeps_prefixes=False, stores_after=1000), "kv_series")["kv_series"]
    assert (result.status, "0 tokens from the prefix cache" in result.reason) == ("failed", True)


def test_a_late_store_is_waited_for_with_new_prompts(run: Run) -> None:
    result = run(Engine(stores_after=20), "kv_series")["kv_series"]
    assert result.status == "passed"
    assert result.evidence["external_attempts"] > 1


def test_an_lmcache_that_never_stores_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.checks.kv_series.STORE_WAITS_S", (0.0, 0.01))
    result = run(Engine(stores_after=1000), "kv_series")["kv_series"]
    assert (result.status, "in 2 tries" in result.reason) == ("failed", True)


@pytest.mark.parametrize(
    ("changes", "part", "reason"),
    [
        ({"prefix_caching": False}, "prefix_hit", "prefix caching is off"),
        ({"connector": None}, "external_hit", "no KV connector"),
        ({"connector": "NixlConnector", "chunk_tokens": None}, "external_hit", "NixlConnector keeps no chunks"),
        ({"kv_role": "kv_producer"}, "external_hit", "kv_producer"),
        ({"chunk_tokens": 512}, "external_hit", "no room for an LMCache chunk of 512"),
    ],
)
def test_a_part_that_does_not_apply_says_why(run: Run, changes: dict[str, Any], part: str, reason: str) -> None:
    engine = Engine(
        keeps_prefixes=changes.get("prefix_caching", True), stores_after=0 if part == "prefix_hit" else 1000
    )
    result = run(engine, "kv_series", **changes)["kv_series"]
    assert result.status == "passed"
    assert reason in result.evidence[part]["skipped"]


def test_one_rank_from_outside_can_not_empty_its_prefix_cache(run: Run) -> None:
    result = run(Engine(ranks=1), "kv_series", secret_passes=False)["kv_series"]
    assert "closed gate" in result.evidence["external_hit"]["skipped"]


def test_a_rank_that_another_one_answers_for_is_caught(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.server.COUNTED_WITHIN_S", 0.1)
    result = run(Engine(other_rank=True), "dp_ranks")["dp_ranks"]
    assert (result.status, "DP rank 1 counted 0 requests" in result.reason) == ("failed", True)


@pytest.mark.usefixtures("no_waiting")
def test_without_counters_answers_are_compared_all_the_same(run: Run) -> None:
    results = run(Engine(counts=False), "dp_ranks", "kv_series")
    assert (results["dp_ranks"].status, results["kv_series"].status) == ("skipped", "passed")
    assert "--disable-log-stats" in results["dp_ranks"].reason
    assert "--disable-log-stats" in results["kv_series"].evidence["hits"]


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("fault", ["prefix", "decode", "external"])
def test_wrong_caches_are_caught_without_counters(run: Run, fault: str) -> None:
    assert run(Engine(counts=False, wrong_on=fault), "kv_series")["kv_series"].status == "failed"


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.checks.kv_series.STORE_WAITS_S", (0.0, 1e-3))
    monkeypatch.setattr("entrypoint.smoke.checks.kv_series.UNCOUNTED_WAIT_S", 1e-3)


def test_a_battery_in_which_nothing_passed_has_failed() -> None:
    nothing = Check("nothing", "Nothing.", lambda _: "there is nothing to do", lambda _: {})
    verdict = battery.run(Context(PLAN, Server(PLAN)), [nothing])
    assert verdict.status == "failed"


def test_a_model_without_chat_template_is_served(run: Run) -> None:
    results = run(Engine(chat_template=False), "chat", "stream")
    assert {result.status for result in results.values()} == {"skipped"}
    assert "chat template" in results["chat"].reason


def test_another_streamed_text_is_caught(run: Run) -> None:
    result = run(Engine(broken_stream=True), "stream")["stream"]
    assert (result.status, "'one tow'" in result.reason) == ("failed", True)


def test_positive_log_probabilities_are_caught(run: Run) -> None:
    result = run(Engine(logprob_shift=10.0), "logprobs")["logprobs"]
    assert (result.status, "finite numbers, none above 0" in result.reason) == ("failed", True)


def test_nan_log_probabilities_are_caught(run: Run) -> None:
    result = run(Engine(logprob_shift=float("nan")), "logprobs")["logprobs"]
    assert result.status == "failed"


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_server_that_allows_fewer_alternatives_is_asked_for_fewer(run: Run, limit: int) -> None:
    results = run(Engine(max_logprobs=limit), "logprobs", "kv_series")
    assert {result.status for result in results.values()} == {"passed"}


def test_another_model_on_the_port_is_caught(run: Run) -> None:
    result = run(Engine(names=("other",)), "models")["models"]
    assert (result.status, "found the models other" in result.reason) == ("failed", True)


def test_a_pooling_model_is_asked_to_pool_only(run: Run) -> None:
    results = run(Engine(), runner="pooling")
    assert {name for name, result in results.items() if result.status == "passed"} == {"models", "pooling", "dp_ranks"}
    assert results["pooling"].evidence["endpoint"] == "/pooling"


def test_a_rank_that_pools_nothing_is_caught(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.server.COUNTED_WITHIN_S", 0.1)
    result = run(Engine(other_rank=True), "dp_ranks", runner="pooling")["dp_ranks"]
    assert (result.status, result.evidence["moved"]) == ("failed", {"0": 8, "1": 0})


def test_a_pooling_model_that_answers_nan_is_caught(run: Run) -> None:
    result = run(Engine(wrong_on="pooling"), "pooling", runner="pooling")["pooling"]
    assert (result.status, "1 of 4 numbers not finite" in result.reason) == ("failed", True)


def test_quick_leaves_out_the_series_and_says_so(run: Run) -> None:
    result = run(Engine(), "kv_series", level="quick")["kv_series"]
    assert (result.status, result.reason) == ("skipped", "SPLINT_SMOKE=quick leaves it out")


def test_an_incomplete_roster_is_named() -> None:
    with listening(Engine()) as url:
        plan = replace(PLAN, base_url=url, expected_roster=({"role": "engine_core", "dp_rank": 1},))
        folder = Path("/nonexistent")
        roster = next(check for check in CHECKS if check.id == "roster")
        verdict = battery.run(Context(plan, Server(plan), folder), [roster])
    assert "engine_core DP1 has not attested" in verdict.checks[0].reason


def budget_check(folder: Path, *said: dict[str, Any] | None) -> CheckResult:
    """The verdict on engine cores that say this of their budget, one after the other."""
    rundir.prepare(folder)
    for dp_rank, facts in enumerate(said):
        entry = {"role": "engine_core", "dp_rank": dp_rank, "seams": [], "start_time": None, "pid": dp_rank}
        told = {} if facts is None else {"kv_budget": facts}
        rundir.write_json(folder / rundir.ROSTER / f"{dp_rank}.json", {**entry, "facts": told})
    plan = replace(PLAN, expected_roster=({"role": "engine_core"},))
    check = next(check for check in CHECKS if check.id == "kv_budget")
    (result,) = battery.run(Context(plan, Server(plan), folder), [check]).checks
    return result


def agreed(dp_rank: int, blocks: int, **more: Any) -> dict[str, Any]:
    return {"applies": True, "policy": "align", "own": [{"dp_rank": dp_rank, "blocks": blocks}], **more}


ROWS = [{"dp_rank": rank, "blocks": 90} for rank in range(3)]


def test_equal_budgets_pass_with_the_ranks_of_other_nodes(tmp_path: Path) -> None:
    result = budget_check(tmp_path, agreed(0, 90, ranks=ROWS), agreed(1, 90))
    assert (result.status, result.evidence["blocks"]) == ("passed", {"DP0": 90, "DP1": 90, "DP2": 90})


def test_a_rank_that_allocated_otherwise_is_named(tmp_path: Path) -> None:
    result = budget_check(tmp_path, agreed(0, 90, ranks=ROWS), agreed(1, 89))
    assert result.status == "failed"
    assert "'DP1': 89" in result.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "carries the kv_budget patch"),
        ({"applies": False, "reason": "one engine", "own": [{"dp_rank": 0, "blocks": 9}]}, "one engine"),
        (agreed(0, 90, policy="report"), "SPLINT_KV_BUDGET=report"),
    ],
)
def test_where_no_budget_was_agreed_the_check_says_why(
    tmp_path: Path, said: dict[str, Any] | None, reason: str
) -> None:
    result = budget_check(tmp_path, said)
    assert (result.status, reason in result.reason) == ("skipped", True)


def test_a_check_that_hangs_is_left_behind_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery, "MIN_SHARE_S", 0.05)
    released = threading.Event()
    hangs = Check("hangs", "Nothing.", lambda _: None, lambda _: {"released": released.wait(60)}, share=0.0)
    verdict = battery.run(Context(PLAN, Server(PLAN)), [hangs])
    released.set()
    assert (verdict.status, verdict.seconds < 5) == ("failed", True)
    assert "no result after" in verdict.checks[0].reason


def test_a_server_that_is_gone_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.checks.models.LISTEN_TIMEOUT_S", 0.1)
    plan = replace(PLAN, base_url="http://127.0.0.1:1")
    verdict = battery.run(Context(plan, Server(plan)), CHECKS[:1])
    assert "found no answer" in verdict.checks[0].reason


def test_the_secret_is_in_no_verdict(run: Run) -> None:
    results = run(Engine(wrong_on="prefix"))
    assert SECRET not in json.dumps([(result.reason, result.evidence) for result in results.values()])
