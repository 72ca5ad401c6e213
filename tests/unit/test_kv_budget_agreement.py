"""Simulated DP ranks agree through a real store: same decision everywhere, names in every refusal, linear cost."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.simulated_ranks import BLOCK_SIZE, BYTES_PER_BLOCK, Outcome, hello, measurement, simulate, store

from patches.framework import settings
from patches.framework.errors import BudgetError, SettingError
from patches.kv_budget import agreement, channel, wrappers
from patches.kv_budget.agreement import Agreement
from patches.kv_budget.channel import Channel
from patches.kv_budget.decision import decide, describe
from patches.kv_budget.measurement import Hello
from patches.kv_budget.shares import share_of

CASES = json.loads((Path(__file__).parents[1] / "cases" / "kv_budget.json").read_text())["cases"]
GROUPS = [case for case in CASES if "ranks" in case and "inert" not in case and "max_model_len" not in case]


def measured(case: dict[str, Any]) -> list[Any]:
    sizes = (12288, 4096) if case.get("pp") == 2 else ()
    override = case.get("num_gpu_blocks_override")
    return [measurement(rank, memory, sizes, override=override) for rank, memory in enumerate(case["ranks"])]


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: case["name"])
def test_case(case: dict[str, Any]) -> None:
    policy = case.get("policy", "align")
    ranks = measured(case)
    outcomes, _ = simulate(ranks, policy=policy)
    if "error_names" in case:
        for outcome in outcomes:
            assert isinstance(outcome.error, BudgetError)
            assert all(name in str(outcome.error) for name in case["error_names"])
        return
    assert [outcome.error for outcome in outcomes] == [None] * len(ranks)
    assert [outcome.blocks for outcome in outcomes] == case["blocks"]
    rows = outcomes[0].rows
    for rank, tokens in case.get("tokens_given_up", {}).items():
        assert rows[int(rank)]["tokens_given_up"] == tokens
    if "spread_percent" in case:
        assert f"spread {case['spread_percent']} %" in describe(ranks)
    if "bytes_agreed" in case:
        assert decide(ranks, policy=policy, ep_size=1).bytes_agreed == tuple(case["bytes_agreed"])
    if policy == "align":
        assert all(sum(outcome.memory) % BYTES_PER_BLOCK == 0 for outcome in outcomes)


def errors(outcomes: list[Outcome]) -> set[str]:
    return {str(outcome.error) for outcome in outcomes}


UNEVEN = [measurement(0, [100 * BYTES_PER_BLOCK]), measurement(1, [90 * BYTES_PER_BLOCK + 5])]


def test_a_rest_of_a_block_makes_no_difference() -> None:
    ranks = [measurement(rank, [90 * BYTES_PER_BLOCK + rest]) for rank, rest in enumerate((0, 5, 16383))]
    outcomes, _ = simulate(ranks, policy="strict")
    assert [outcome.blocks for outcome in outcomes] == [90, 90, 90]


def test_strict_refuses_what_align_would_level_and_names_both_ranks() -> None:
    outcomes, _ = simulate(UNEVEN, policy="strict")
    (message,) = errors(outcomes)
    assert "min 90 blocks (DP1 (node0, cuda:1)), max 100 (DP0 (node0, cuda:0)), spread 10.0 %" in message
    assert "costs 160 tokens" in message


def test_the_cause_that_flags_give_is_named() -> None:
    ranks = [
        measurement(rank, [blocks * BYTES_PER_BLOCK], cause={"gpu_memory_utilization": share})
        for rank, (blocks, share) in enumerate(((100, 0.9), (90, 0.85)))
    ]
    assert "different flags: gpu_memory_utilization 0.85 against 0.9" in describe(ranks)


def test_equal_flags_with_zero_dummy_ids_point_at_the_routing() -> None:
    ranks = [
        measurement(rank, [n * BYTES_PER_BLOCK], cause={"randomized_dummy_inputs": False})
        for rank, n in enumerate((9, 8))
    ]
    assert "VLLM_RANDOMIZE_DP_DUMMY_INPUTS=0" in describe(ranks)
    assert "another process on cuda:1" in describe(ranks)


@pytest.fixture
def heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """DP0 does not stay for ranks that never hear."""
    monkeypatch.setattr(channel, "HEARD_WITHIN_S", 0.2)


@pytest.mark.usefixtures("heard_at_once")
def test_a_rank_that_never_reports_is_named_to_all_others() -> None:
    ranks = [measurement(rank, [BYTES_PER_BLOCK]) for rank in range(4)]
    outcomes, seconds = simulate(ranks, silent=[2], timeout_s=3.0)
    assert seconds < 20, "the patience of who waits for DP0's answer, which is longer"
    for rank in (0, 1, 3):
        assert "DP2 did not report within 3 s (hello, missing ranks [2])" in str(outcomes[rank].error)


@pytest.mark.usefixtures("heard_at_once")
def test_so_it_is_where_dp0_itself_came_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """DP1 waits since before DP0 began to: it must neither give up first nor blame DP0."""
    monkeypatch.setattr(agreement, "ANSWER_GRACE_S", 2.0)

    def late(rank: int) -> Hello:
        time.sleep(0 if rank else 2.5)
        return hello(rank)

    outcomes, _ = simulate(
        [measurement(rank, [BYTES_PER_BLOCK]) for rank in range(3)], silent=[2], timeout_s=4.5, greet=late
    )
    for outcome in outcomes[:2]:
        assert "DP2 did not report within 4.5 s (hello, missing ranks [2])" in str(outcome.error)


def test_a_rank_that_takes_no_part_is_missed_before_the_long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded yet, so a minute is long enough, whatever measuring may take."""
    assert agreement.HELLO_TIMEOUT_S == 60
    monkeypatch.setattr(agreement, "HELLO_TIMEOUT_S", 0.5)
    outcomes, _ = simulate([measurement(rank, [BYTES_PER_BLOCK]) for rank in range(2)], silent=[1], timeout_s=1800)
    assert "DP1 did not report within 0.5 s (hello, missing ranks [1])" in str(outcomes[0].error)


def test_dp0_that_never_reports_is_named_too() -> None:
    outcomes, _ = simulate([measurement(rank, [BYTES_PER_BLOCK]) for rank in range(2)], silent=[0], timeout_s=1.0)
    assert "DP0 did not report within 1 s (hello, missing ranks [0])" in str(outcomes[1].error)


@pytest.mark.parametrize(
    "flag", ["patch_set", "SPLINT_KV_BUDGET", "max_model_len", "kv_cache_dtype", "num_gpu_blocks_override"]
)
def test_ranks_that_can_not_have_one_budget_stop_before_they_measure(flag: str) -> None:
    ranks = [measurement(rank, [BYTES_PER_BLOCK]) for rank in range(3)]
    outcomes, _ = simulate(ranks, greet=lambda rank: hello(rank, **{flag: "other" if rank == 2 else "usual"}))
    (message,) = errors(outcomes)
    assert f'{flag} is "other" on DP2 (node0, cuda:2), "usual" elsewhere' in message
    assert not any(outcome.memory for outcome in outcomes)


@pytest.mark.parametrize(("policy", "refused"), [("strict", True), ("align", False)])
def test_flags_that_may_differ_are_refused_before_profiling_by_strict_alone(policy: str, *, refused: bool) -> None:
    ranks = [measurement(rank, [BYTES_PER_BLOCK]) for rank in range(2)]
    outcomes, _ = simulate(
        ranks, policy=policy, greet=lambda rank: hello(rank, gpu_memory_utilization=0.9 - rank * 0.05)
    )
    (message,) = errors(outcomes)
    assert ("gpu_memory_utilization is 0.85 on DP1 (node0, cuda:1), 0.9 elsewhere" in message) is refused


def test_different_specifications_of_the_kv_cache_are_refused() -> None:
    ranks = [measurement(rank, [BYTES_PER_BLOCK], facts={"KV specification": f"{rank}"}) for rank in range(2)]
    (message,) = errors(simulate(ranks)[0])
    assert "KV specification is" in message


def test_overrides_that_differ_are_refused_also_without_the_hello() -> None:
    ranks = [measurement(rank, [90 * BYTES_PER_BLOCK], override=80 + rank) for rank in range(2)]
    (message,) = errors(simulate(ranks)[0])
    assert "num_gpu_blocks_override is 81 on DP1" in message


@dataclass(frozen=True)
class NewerHello(Hello):
    """What another release of vllm-splint may say."""

    news: str = "unheard of"


def test_words_of_another_release_are_refused_to_all() -> None:
    ranks = [measurement(rank, [BYTES_PER_BLOCK]) for rank in range(2)]
    outcomes, _ = simulate(ranks, greet=lambda rank: NewerHello(**vars(hello(rank))) if rank else hello(rank))
    (message,) = errors(outcomes)
    assert "can't read what a rank said (hello)" in message
    assert "one release of vllm-splint on all nodes" in message


@pytest.mark.parametrize("word", ["", "null", "[]", "5", '"hello"', "{}", '{"dp_rank": 1}'])
def test_a_word_that_is_no_record_is_refused_by_dp0(word: str) -> None:
    server = store()
    peer = Channel(server.clone(), 1, 2)
    peer.say("hello", word)
    peer.heard("hello")
    with pytest.raises(BudgetError, match=r"DP0 can't read what a rank said \(hello\).*Use one image"):
        Agreement(Channel(server, 0, 2), policy="align", ep_size=2, timeout_s=10).hello(hello(0))


def test_workers_that_do_not_pair_up_are_refused() -> None:
    ranks = [measurement(0, [BYTES_PER_BLOCK] * 2), measurement(1, [BYTES_PER_BLOCK])]
    (message,) = errors(simulate(ranks)[0])
    assert "workers is" in message


def test_a_plan_that_leaves_the_decision_is_refused_before_anything_is_allocated() -> None:
    ranks = [measurement(rank, [90 * BYTES_PER_BLOCK]) for rank in range(2)]
    outcomes, _ = simulate(ranks, plan=lambda own, memory: own.blocks_in(tuple(memory)) - own.dp_rank)
    (message,) = errors(outcomes)
    assert "dp 1 ep 0 has 89 blocks, not 90" in message


def test_all_ranks_leaving_the_decision_alike_is_refused_too() -> None:
    ranks = [measurement(rank, [90 * BYTES_PER_BLOCK]) for rank in range(2)]
    (message,) = errors(simulate(ranks, plan=lambda *_: 45)[0])
    assert "the ranks planned 45 blocks; wanted the agreed 90" in message


def test_different_lengths_of_an_equal_plan_are_refused() -> None:
    ranks = [measurement(rank, [90 * BYTES_PER_BLOCK]) for rank in range(2)]
    (message,) = errors(simulate(ranks, max_model_len=lambda rank: 96 + rank)[0])
    assert "max_model_len came out as [96, 97]" in message


def test_a_share_for_a_rank_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINT_KV_BUDGET_RANKS", "1=0.5,2=12GiB")
    assert share_of(1, 3) == {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": None}
    assert share_of(2, 3) == {"kv_cache_memory_bytes": 12 * 2**30}
    assert share_of(0, 3) == {}
    with pytest.raises(BudgetError, match=r"names DP rank 2; wanted ranks 0 to 1"):
        share_of(0, 2)


def test_a_rank_that_refuses_its_share_tells_the_others_why(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    member = SimpleNamespace(join=lambda: None, watch=SimpleNamespace(failed=told.append))
    monkeypatch.setattr(wrappers, "Member", lambda *_: member)
    monkeypatch.setenv("SPLINT_KV_BUDGET_RANKS", "2=0.5")
    parallel = SimpleNamespace(data_parallel_rank=1, data_parallel_size=2)
    with pytest.raises(BudgetError, match="names DP rank 2"):
        wrappers._join(SimpleNamespace(dp_store=None), SimpleNamespace(parallel_config=parallel))
    assert [text.split(";")[0] for text in told] == ["SPLINT_KV_BUDGET_RANKS names DP rank 2"]


@pytest.mark.parametrize(
    "text", ["1", "1=", "1=2", "1=0", "1=0GiB", "1=0.0001KiB", "\u0661=0.5", "1=0.5,1=0.6", "x=0.5", "1=12TiB"]
)
def test_a_malformed_share_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="SPLINT_KV_BUDGET_RANKS"):
        settings.get("SPLINT_KV_BUDGET_RANKS", {"SPLINT_KV_BUDGET_RANKS": text})


def test_report_changes_nothing_and_refuses_nothing() -> None:
    ranks = [*UNEVEN[:1], measurement(1, [90 * BYTES_PER_BLOCK], facts={"layout": "other"})]
    outcomes, _ = simulate(ranks, policy="report")
    assert [outcome.memory for outcome in outcomes] == [[100 * BYTES_PER_BLOCK], [90 * BYTES_PER_BLOCK]]
    assert errors(outcomes) == {"None"}


def test_a_stage_without_kv_layers_neither_counts_nor_changes() -> None:
    ranks = [
        measurement(rank, [blocks * BYTES_PER_BLOCK, 7], [BYTES_PER_BLOCK, 0]) for rank, blocks in enumerate((3, 2))
    ]
    outcomes, _ = simulate(ranks)
    assert [outcome.memory for outcome in outcomes] == [[2 * BYTES_PER_BLOCK, 7]] * 2


def test_the_cost_of_agreeing_grows_linearly_and_stays_small() -> None:
    """A thousand threads in one interpreter stall one another now and then, so growth is read off the best of three
    runs, and off the processor time of the ranks.
    """
    seconds, cpu = {}, {}
    for size in (64, 256, 1024):
        ranks = [measurement(rank, [(90 + rank % 7) * BYTES_PER_BLOCK]) for rank in range(size)]
        runs = [simulate(ranks, ep_size=size) for _ in range(3)]
        seconds[size] = min(spent for _, spent in runs)
        cpu[size] = min(sum(outcome.cpu_s for outcome in outcomes) for outcomes, _ in runs)
        for outcomes, _ in runs:
            assert {outcome.blocks for outcome in outcomes} == {90}
            assert (
                sum(row["tokens_given_up"] for row in outcomes[0].rows)
                == sum(rank % 7 for rank in range(size)) * BLOCK_SIZE
            )
    print(
        "simulated DP ranks, seconds to agree: "
        + ", ".join(f"{size}: {seconds[size]:.2f} ({cpu[size] * 1e3:.0f} ms of all processors)" for size in seconds)
    )
    assert seconds[64] < 2
    assert seconds[1024] < 20
    assert cpu[1024] / cpu[64] < 16 * 3
