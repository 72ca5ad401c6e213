"""Which tokens the profile run sends to which experts, on the runners of each release (vllm#57270, vllm#57262).

Real in it: two data-parallel ranks, the runner from ``load_model`` to ``profile_run``, its dummy batches, the forward
context, the router, the placement of experts. What can't run on CPU is named in ``support.profile_probe``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.releases import value

TOKENS = 512
BOTH = "profile_routing,dummy_token_routing"
VARIABLE = "VLLM_RANDOMIZE_DP_DUMMY_INPUTS"

QUICK = "0.28.0"
V1_ONLY = ("0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0")
OPT_IN = ("0.25.0", "0.25.1", "0.26.0")
SKIPPING = ("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0")
HEALED = ("0.31.0", "0.32.0", "0.33.0")
INSTALLED = ("0.32.0", "V2")
OTHER_HEALED = [(release, runner) for release in HEALED for runner in ("V1", "V2") if (release, runner) != INSTALLED]


@cache
def look(version: str, runner: str, patches: str, *, expert_parallel: bool = True, variable: str = "") -> Any:
    """What the first rank's dummy runs did; both ranks must tell the same but for the ids that they drew."""
    tests = str(Path(__file__).parents[1])
    code = f"""
    import sys
    sys.path.append({tests!r})
    from support import profile_probe
    profile_probe.main({runner!r}, expert_parallel={expert_parallel})
    """
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", **({VARIABLE: variable} if variable else {})}
    first, second = value(version, code, patches=patches, **env)
    assert first["states"] == second["states"]
    return first


def spread(run: Any) -> bool:
    """Whether each of the two expert-parallel ranks computes 40 % of the tokens or more."""
    return bool(run["distinct"] > 200 and min(run["shares"]) > 0.4)


def test_the_profile_run_of_0_28_reaches_the_experts_and_both_ranks_share_it() -> None:
    found = look(QUICK, "V2", BOTH)
    assert found["profile"]["padding"] == 0
    assert found["profile"]["routed"] == TOKENS
    assert spread(found["profile"])


@pytest.mark.parametrize("version", [QUICK, *[pytest.param(v, marks=pytest.mark.full) for v in SKIPPING if v != QUICK]])
def test_other_dummy_runs_keep_their_padding_and_their_zeros(version: str) -> None:
    found = look(version, "V2", BOTH)
    assert (found["idle"]["padding"], found["idle"]["routed"], found["idle"]["distinct"]) == (1, 0, 1)
    assert (found["warm_up"]["padding"], found["warm_up"]["routed"], found["warm_up"]["distinct"]) == (TOKENS, 0, 1)


def test_drawing_leaves_the_generator_alone_that_unseeded_requests_sample_from() -> None:
    assert look(QUICK, "V2", BOTH)["same_random"]


@pytest.mark.parametrize(
    ("version", "runner"), [INSTALLED, *(pytest.param(*other, marks=pytest.mark.full) for other in OTHER_HEALED)]
)
def test_since_0_31_the_experts_are_reached_by_themselves_and_shared_with_the_patch(version: str, runner: str) -> None:
    found = look(version, runner, BOTH)
    assert found["states"]["profile_routing"] == ("inert" if runner == "V2" else "pending"), "V1 loads none of it"
    assert found["states"]["dummy_token_routing"] == "applied"
    assert found["profile"]["routed"] == TOKENS
    assert spread(found["profile"])


@pytest.mark.full
@pytest.mark.parametrize("version", SKIPPING)
def test_without_the_patch_no_token_of_a_profile_run_reaches_an_expert(version: str) -> None:
    profile = look(version, "V2", "none")["profile"]
    assert (profile["padding"], profile["routed"]) == (TOKENS, 0)


@pytest.mark.full
@pytest.mark.parametrize("version", OPT_IN)
def test_where_skipping_padding_is_an_option_the_patch_takes_the_mark_off(version: str) -> None:
    assert look(version, "V2", "none")["profile"]["padding"] == TOKENS
    found = look(version, "V2", "profile_routing")
    assert found["profile"]["padding"] == 0
    assert found["idle"]["padding"] == 1


@pytest.mark.full
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("version", HEALED)
def test_without_the_patch_one_rank_gets_every_token(version: str, runner: str) -> None:
    assert look(version, runner, "none")["profile"]["shares"] == [1.0, 0.0]


@pytest.mark.full
@pytest.mark.parametrize("version", [*V1_ONLY, *OPT_IN, *SKIPPING])
def test_with_the_v1_runner_one_rank_gets_every_token_and_with_the_patch_both_share_them(version: str) -> None:
    assert look(version, "V1", "none")["profile"]["shares"] == [1.0, 0.0]
    found = look(version, "V1", "dummy_token_routing")
    assert spread(found["profile"])
    assert not found["left"], "the variable is on for the profile run only"


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.24.0", *OPT_IN, *SKIPPING])
def test_with_the_v2_runner_both_ranks_share_the_tokens(version: str) -> None:
    assert look(version, "V2", "profile_routing")["profile"]["shares"] == [1.0, 0.0]
    assert spread(look(version, "V2", BOTH)["profile"])


@pytest.mark.full
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("version", [QUICK, "0.32.0"])
def test_what_the_operator_sets_decides_and_without_expert_parallelism_nothing_is_drawn(
    version: str, runner: str
) -> None:
    assert look(version, runner, BOTH, variable="0")["profile"]["distinct"] == 1
    assert spread(look(version, runner, BOTH, variable="1")["profile"])
    assert look(version, runner, BOTH, expert_parallel=False)["profile"]["distinct"] == 1
