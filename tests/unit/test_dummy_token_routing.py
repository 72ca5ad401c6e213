"""When the profile run draws its token ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from patches.dummy_token_routing.wrappers import VARIABLE, by_argument, wanted
from patches.framework.records import Seam


@pytest.mark.parametrize(
    ("ranks", "expert_parallel", "variable", "draws"),
    [
        (2, True, None, True),
        (2, True, "1", True),
        (2, True, "0", False),
        (2, True, "", False),
        (2, False, None, False),
        (2, False, "1", False),
        (1, True, None, False),
    ],
)
def test_ids_are_drawn_under_data_and_expert_parallelism_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, ranks: int, expert_parallel: bool, variable: str | None, draws: bool
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    parallel = SimpleNamespace(data_parallel_size=ranks, enable_expert_parallel=expert_parallel)
    assert wanted(parallel) is draws


@pytest.mark.parametrize("asked", [False, True])
def test_a_worker_that_asks_for_random_inputs_gets_them_whatever_we_think(asked: bool) -> None:
    heard: list[bool] = []
    seam = Seam("profile_run", lambda _, randomize_inputs: heard.append(randomize_inputs), lambda: None)
    parallel = SimpleNamespace(data_parallel_size=1, enable_expert_parallel=False)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    by_argument(seam)(runner, randomize_inputs=asked)
    assert heard == [asked]
