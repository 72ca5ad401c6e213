"""One KV budget for two real DP ranks, and what becomes of them when one of them fails on the way to it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import Server, running

FAILING = Path(__file__).parent / "failing_rank"
PARALLEL = ("--data-parallel-size", "2", "--enable-expert-parallel", "--api-server-count", "1")
LAYERS, KEYS_AND_VALUES, KV_HEADS, HEAD_SIZE, BYTES = 2, 2, 2, 64, 2
BLOCK_SIZE = 128
BYTES_PER_BLOCK = LAYERS * KEYS_AND_VALUES * KV_HEADS * HEAD_SIZE * BYTES * BLOCK_SIZE
SMALLER_MIB = 700.05
"""What DP1 gets of the 1 GiB that DP0 has; not a whole number of blocks."""
BLOCKS = int(SMALLER_MIB * 2**20) // BYTES_PER_BLOCK
ALL_STOP_S = 10.0
"""Two of them for DP0, which stays until all have heard. Without a word they would wait for minutes."""
VLLM_GRACE_S = 6.0
"""A worker that fails while it is made: vLLM's executor waits for it before it tells the engine core."""

Build = Callable[..., Server]


@pytest.fixture(scope="module")
def uneven(build: Build) -> Iterator[Server]:
    with running(build(*PARALLEL, env={"SPLINT_KV_BUDGET_RANKS": f"1={SMALLER_MIB}MiB"})) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def report(uneven: Server) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(uneven.base_url + "/splint/report").json()
    return answer


def test_ranks_with_unequal_memory_plan_the_blocks_of_the_smaller(report: dict[str, Any]) -> None:
    budget = report["kv_budget"]
    for row in budget["ranks"]:
        print(row)
    assert (budget["applies"], budget["policy"]) == (True, "align")
    measured = [2**30 // BYTES_PER_BLOCK, BLOCKS]
    assert [row["measured_blocks"] for row in budget["ranks"]] == measured
    assert [row["blocks"] for row in budget["ranks"]] == [BLOCKS, BLOCKS]
    assert [row["tokens_given_up"] for row in budget["ranks"]] == [(measured[0] - BLOCKS) * BLOCK_SIZE, 0]


def test_the_engines_allocated_what_was_agreed(uneven: Server) -> None:
    metrics = httpx.get(uneven.base_url + "/metrics").text
    assert re.findall(r'^splint_kv_blocks\{dp_rank="(\d)"\} (\S+)$', metrics, re.MULTILINE) == [
        ("0", str(float(BLOCKS))),
        ("1", str(float(BLOCKS))),
    ]
    # The front end adds up what its engines have.
    assert set(re.findall(r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', metrics, re.MULTILINE)) == {
        str(2 * BLOCKS)
    }
    assert uneven.text().count(f" KV cache size: {BLOCKS * BLOCK_SIZE:,} tokens") == 2


def test_the_log_says_once_who_differs_why_and_what_it_costs(uneven: Server) -> None:
    lines = [line for line in uneven.text().splitlines() if "KV budget: DP ranks disagree" in line]
    print(lines)
    assert len(lines) == 1
    for part in (f"min {BLOCKS} blocks (DP1", "SPLINT_KV_BUDGET_RANKS", f"costs {(8192 - BLOCKS) * BLOCK_SIZE} tokens"):
        assert part in lines[0]


def test_the_table_of_ranks_is_in_the_log_once(uneven: Server) -> None:
    assert uneven.text().count("KV budget (SPLINT_KV_BUDGET=align) of 2 DP ranks:") == 1
    assert uneven.text().count(f"uses {BLOCKS} ({BLOCKS * BLOCK_SIZE} tokens)") == 2


def test_both_ranks_answer_alike(uneven: Server) -> None:
    body = {"model": "tiny", "prompt": list(range(20, 320)), "max_tokens": 16, "temperature": 0}
    answers = [
        httpx.post(uneven.base_url + "/v1/completions", json=body, headers={"X-data-parallel-rank": rank}, timeout=60)
        for rank in ("0", "1")
    ]
    first, second = (answer.json()["choices"][0]["text"] for answer in answers)
    assert first == second


def engines(server: Server) -> int:
    """How many engine cores and workers of the server are alive."""
    names = 0
    for pid in server.members():
        try:
            names += Path(f"/proc/{pid}/cmdline").read_bytes().startswith((b"VLLM::EngineCore", b"VLLM::Worker"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names


def stopped(build: Build, stage: str, rank: int, **env: str) -> tuple[Server, float]:
    """Start two ranks of which one fails; returns the ended server, and seconds from fault to last engine's end."""
    path = os.pathsep.join(filter(None, [str(FAILING), os.environ.get("PYTHONPATH")]))
    server = build(*PARALLEL, env={"PYTHONPATH": path, "FAILING_RANK": f"{stage}:{rank}", **env})
    server.start()
    try:
        server.wait_for(lambda: f"fails while {stage}" in server.text())
        while engines(server):
            time.sleep(0.05)
        at = float(re.findall(rf"fails while {stage} at (\S+)", server.text())[0])
        took = time.time() - at
        code = server.wait_end(60)
    finally:
        server.kill_session()
    print(f"{stage}, DP{rank}: all engines gone after {took:.1f} s, exit code {code}")
    assert code not in (0, None)
    return server, took


@pytest.mark.parametrize(
    ("stage", "rank", "doing", "reason"),
    [
        ("measuring", 1, "measuring its memory", "injected fault"),
        pytest.param("planning", 0, "measuring its memory", "injected fault", marks=pytest.mark.full),
        pytest.param("loading", 1, "loading the model", "WorkerProc initialization failed", marks=pytest.mark.full),
        pytest.param("allocating", 1, "allocating its KV cache", "injected fault", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_stops_all_within_seconds_by_name(
    build: Build, stage: str, rank: int, doing: str, reason: str
) -> None:
    server, took = stopped(build, stage, rank)
    told = rf"KV budget: DP{rank} \(\S+, cpu\) failed while {doing}.*: .*{reason}.*Stopping all 2 ranks"
    assert re.search(told, server.text()), server.tail()
    assert took < ALL_STOP_S + (VLLM_GRACE_S if stage == "loading" else 0)


def test_a_killed_rank_is_missed_by_name(build: Build) -> None:
    server, took = stopped(build, "killed", 1)
    assert re.search(r"KV budget: DP1 \(\S+, cpu\) ended without a word \(killed\?\)", server.text()), server.tail()
    assert took < ALL_STOP_S


def test_a_rank_that_never_reports_is_named_after_the_timeout(build: Build) -> None:
    server, took = stopped(build, "silent", 1, SPLINT_KV_BUDGET_TIMEOUT_S="12")
    assert "KV budget: DP1 did not report within 12 s (measured, missing ranks [1])" in server.text(), server.tail()
    assert took < 12 + ALL_STOP_S + 10


@pytest.mark.full
def test_strict_refuses_unequal_ranks_before_anything_is_allocated(build: Build) -> None:
    env = {"SPLINT_KV_BUDGET": "strict", "SPLINT_KV_BUDGET_RANKS": f"1={SMALLER_MIB}MiB"}
    server = build(*PARALLEL, env=env).start()
    try:
        assert server.wait_end(150) == 78, server.tail()
    finally:
        server.kill_session()
    assert "SPLINT_KV_BUDGET=strict" in server.text()
    assert " KV cache size" not in server.text()
