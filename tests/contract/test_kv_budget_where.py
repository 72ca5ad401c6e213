"""Where the KV budget has nothing to do it leaves no word in the store, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import releases

SUPPORT = str(Path(__file__).parents[1])
PROBE = """
import sys
sys.path.append(SUPPORT)
import json, os
from types import SimpleNamespace as Names
from patches.framework import process
from patches.framework.records import Seam
from patches.kv_budget import engine, wrappers
from patches.kv_budget.decision import decide
from support.simulated_ranks import measurement, store

def config(moe=True, executor="mp", size=2):
    parallel = Names(
        data_parallel_rank=0, data_parallel_rank_local=0, data_parallel_index=0, data_parallel_size=size, world_size=1,
        data_parallel_master_ip="127.0.0.1", distributed_executor_backend=executor, enable_expert_parallel=True,
    )
    model = Names(is_moe=moe, max_model_len=128)
    return Names(parallel_config=parallel, model_config=model, cache_config=Names(block_size=16))

def words(vllm_config):
    core = Names()
    wrappers.init_data_parallel(Seam("t", lambda core, _: setattr(core, "dp_store", store()), lambda: None))(
        core, vllm_config)
    return core.dp_store.num_keys()

def alone(vllm_config):
    planned = wrappers.initialize_kv_caches(Seam("t", lambda core, _: Names(num_blocks=90), lambda: None))
    planned(Names(), vllm_config)
    return process.start().facts["kv_budget"]


def handed_to_new_ranks(policy):
    # Two ranks of two workers, of 95 and 90 or 110 blocks; the second rank's engine, where stock notes 95.
    measured = [measurement(rank, [95 * 16384, (90 + rank * 20) * 16384]) for rank in range(2)]
    decision = decide(measured, policy=policy, ep_size=4)
    core = Names(available_gpu_memory_for_kv_cache=95 * 16384)
    process.start().note(kv_budget={"memory": decision.memory_for(measured[1])})
    wrappers._tell_new_ranks(core, Names(agreement=Names(decision=decision)))
    return core.available_gpu_memory_for_kv_cache

found = {"external_launcher": words(config(executor="external_launcher"))}
found["alone"] = [alone(config(size=1)), alone(config(moe=False)), alone(config(executor="external_launcher"))]
found["new ranks"] = {policy: handed_to_new_ranks(policy) for policy in ("align", "report")}
os.environ["VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"] = "1"
found["elastic scale-up"] = words(config())
print(json.dumps(found))
""".replace("SUPPORT", repr(SUPPORT))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Everything in one interpreter."""
    said: dict[str, Any] = releases.value("0.32.0", PROBE, patches="kv_budget")
    return said


@pytest.mark.parametrize("where", ["external_launcher", "elastic scale-up"])
def test_no_word_is_left_in_the_store(found: dict[str, Any], where: str) -> None:
    assert found[where] == 0


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (0, "data_parallel_size=1: one engine"),
        (1, "a dense model: each DP rank is an engine by itself"),
        (2, "external_launcher: its executor already takes the least memory of all ranks"),
    ],
)
def test_an_engine_without_a_group_says_why_and_what_it_has(found: dict[str, Any], number: int, reason: str) -> None:
    facts = found["alone"][number]
    assert (facts["applies"], facts["reason"]) == (False, reason)
    assert facts["own"] == [{"dp_rank": 0, "blocks": 90, "tokens": 1440, "max_model_len": 128}]


@pytest.mark.parametrize(("policy", "blocks"), [("align", 90), ("report", 95)])
def test_elastic_ep_hands_new_ranks_what_holds_for_every_worker_and_under_report_what_stock_does(
    found: dict[str, Any], policy: str, blocks: int
) -> None:
    assert found["new ranks"][policy] == blocks * 16384
