"""Persisted start-up plans under data and tensor parallelism, with the functions of the releases that have them."""

from __future__ import annotations

from typing import Any

import pytest
from support import releases

pytest.importorskip("vllm")

CODE = """
import json, os, sys
from types import SimpleNamespace
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig
from vllm.v1.worker import startup_plan as plans

GIB = 1 << 30
os.environ["VLLM_ENABLE_STARTUP_PLAN"] = "1"

def worker(dp_rank=0, dp_size=1, dense=False, free=60, rank=0, workers=1):
    parallel = ParallelConfig(data_parallel_size=dp_size, data_parallel_rank=dp_rank)
    parallel.world_size = workers
    if dense:  # as an engine of its own, as vLLM makes it for the ranks of a dense model
        parallel.data_parallel_size, parallel.data_parallel_rank = 1, 0
    made = VllmConfig(device_config=DeviceConfig(device="cpu"))
    made.parallel_config = parallel
    made.cache_config.kv_cache_memory_bytes = None
    return SimpleNamespace(vllm_config=made, parallel_config=parallel, cache_config=made.cache_config, rank=rank,
        init_snapshot=SimpleNamespace(free_memory=free * GIB))

def applied(boots):
    plans.maybe_apply_startup_plan(boots)
    return (boots.cache_config.kv_cache_memory_bytes or 0) // GIB

def both(ask, folder):
    answers = []
    for name in ("patched", "stock"):
        os.environ["VLLM_CACHE_ROOT"] = os.path.join(folder, name)
        if name == "stock":
            for function in ("compute_plan_fingerprint", "maybe_apply_startup_plan"):
                setattr(plans, function, getattr(plans, function).__wrapped__)
        answers.append(ask())
    return answers
"""
VOTE = """
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment

def vote(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        init_distributed_environment(2, rank, f"file://{folder}/rendezvous", rank, "gloo")

    def ask():
        plans.maybe_save_startup_plan(worker(rank=rank, workers=2), 30 * GIB)
        return [applied(worker(rank=rank, workers=2)), applied(worker(rank=rank, workers=2, free=60 - rank))]

    return both(ask, os.path.join(folder, "votes"))

def votes():
    '''Two workers, forked from here: vLLM is imported once.'''
    folder, found, pids = os.environ["PLANS"], [], []
    for rank in (0, 1):
        pids.append(os.fork())
        if not pids[-1]:
            said = vote(rank, folder)
            with open(os.path.join(folder, f"vote{rank}.json"), "w") as file:
                json.dump(said, file)
            os._exit(0)
    for rank, pid in enumerate(pids):
        assert os.waitpid(pid, 0)[1] == 0
        with open(os.path.join(folder, f"vote{rank}.json")) as file:
            found.append(json.load(file))
    return {"votes": found}
"""
ONE_ENGINE = """
from vllm.platforms import current_platform
for name, value in {"get_device_name": "a device", "get_device_total_memory": 80 * GIB}.items():
    setattr(type(current_platform), name, classmethod(lambda cls, *args, value=value: value))

def ask():
    found = {}
    plans.maybe_save_startup_plan(worker(0, 2, dense=True), 30 * GIB)
    plans.maybe_save_startup_plan(worker(1, 2, dense=True), 20 * GIB)
    found["dense, rank 0 and 1"] = [applied(worker(rank, 2, dense=True)) for rank in (0, 1)]
    found["dense, too little free"] = applied(worker(1, 2, dense=True, free=59))
    plans.maybe_save_startup_plan(worker(0, 2), 30 * GIB)
    plans.maybe_save_startup_plan(worker(1, 2), 20 * GIB)
    found["together"] = [applied(worker(0, 2)), applied(worker(1, 2, free=59))]
    found["files"] = len(os.listdir(os.path.join(os.environ["VLLM_CACHE_ROOT"], "startup_plan")))
    explicit = worker()
    explicit.cache_config.kv_cache_memory_bytes = 7 * GIB
    found["explicit"] = applied(explicit)
    os.environ["VLLM_ENABLE_STARTUP_PLAN"] = "0"
    found["off"] = applied(worker(0, 2, dense=True))
    os.environ["VLLM_ENABLE_STARTUP_PLAN"] = "1"
    return found

print(json.dumps({**votes(), "alone": both(ask, os.environ["PLANS"])}))
"""
LATER = ["0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0"]


@pytest.fixture(
    params=["0.26.0", *(pytest.param(release, marks=pytest.mark.full) for release in LATER), "0.32.0"], scope="module"
)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all of it came to in one interpreter; ``alone`` and each of ``votes`` are patched and stock."""
    said: dict[str, Any] = releases.value(
        request.param,
        CODE + VOTE + ONE_ENGINE,
        patches="startup_plan_rank",
        PLANS=str(tmp_path_factory.mktemp("plans")),
    )
    return said


def test_each_dp_rank_has_its_own_plan_and_ranks_that_profile_together_all_measure(
    answers: dict[str, Any],
) -> None:
    found, _ = answers["alone"]
    assert found["dense, rank 0 and 1"] == [30, 20]
    assert found["dense, too little free"] == 0
    assert found["together"] == [0, 0]
    assert found["files"] == 4
    assert found["explicit"] == 7
    assert found["off"] == 0


def test_in_stock_the_last_writer_wins_and_one_rank_skips_what_the_other_waits_in(
    answers: dict[str, Any],
) -> None:
    _, found = answers["alone"]
    assert found["dense, rank 0 and 1"] == [20, 20]
    assert found["together"] == [20, 0]


def test_the_workers_of_one_engine_apply_their_plans_together_or_not_at_all(answers: dict[str, Any]) -> None:
    assert answers["votes"] == [[[30, 0], [30, 30]], [[30, 0], [30, 0]]]
