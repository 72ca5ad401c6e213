from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.smoke.scoring import Answer, Yardstick, agreed_steps, distance, spread

log_probabilities = st.floats(min_value=-30, max_value=0, allow_nan=False)
distributions = st.dictionaries(st.integers(0, 50), log_probabilities, min_size=1, max_size=20)


def answer(*steps: tuple[int, dict[int, float]]) -> Answer:
    return Answer(tuple(token for token, _ in steps), tuple(top for _, top in steps))


@given(distributions)
def test_a_distribution_is_no_distance_from_itself(top: dict[int, float]) -> None:
    assert spread(top, top) == 0


@given(distributions, distributions)
def test_spread_does_not_depend_on_the_order(left: dict[int, float], right: dict[int, float]) -> None:
    assert spread(left, right) == pytest.approx(spread(right, left))


@given(distributions, st.floats(0.01, 5))
def test_a_shift_of_all_tokens_is_the_spread(top: dict[int, float], shift: float) -> None:
    assert spread(top, {token: value - shift for token, value in top.items()}) == pytest.approx(shift)


def test_a_token_on_one_list_only_counts_as_far_as_it_is_certain() -> None:
    assert spread({1: -1.0, 2: -5.0}, {1: -1.0, 3: -2.0}) == pytest.approx(math.sqrt(3.0**2 / 3))


def test_steps_after_the_first_other_token_are_not_compared() -> None:
    one = answer((1, {1: -0.5}), (2, {2: -0.5}), (3, {3: -0.5}))
    other = answer((1, {1: -0.5}), (9, {2: -0.6}), (3, {3: -9.0}))
    assert agreed_steps(one, other) == 2
    assert distance(one, other) == pytest.approx(0.1)


def test_nan_is_never_within_a_tolerance() -> None:
    broken = distance(answer((1, {1: math.nan})), answer((1, {1: -1.0})))
    assert not broken <= Yardstick(noise=0.0, signal=1.0).tolerance


def test_tolerance_follows_the_noise_of_a_noisy_server() -> None:
    assert Yardstick(noise=0.1, signal=2.0).tolerance == pytest.approx(0.4)


def test_tolerance_follows_the_signal_of_an_exact_server() -> None:
    assert Yardstick(noise=0.0, signal=0.08).tolerance == pytest.approx(0.01)


@given(st.floats(0, 10), st.floats(0, 10))
def test_no_tolerance_is_so_wide_that_another_prompts_answer_passes(noise: float, signal: float) -> None:
    yardstick = Yardstick(noise, signal)
    assert max(yardstick.tolerance, yardstick.same_bytes_tolerance) <= signal / 2


@given(st.floats(0, 10), st.floats(1e-3, 10))
def test_a_steady_server_is_within_its_own_tolerance(noise: float, signal: float) -> None:
    yardstick = Yardstick(noise, signal)
    assert not yardstick.steady or noise <= yardstick.tolerance


@pytest.mark.parametrize("noise", [0.6, math.nan])
def test_a_server_whose_cold_runs_differ_is_not_steady(noise: float) -> None:
    assert not Yardstick(noise, signal=1.0).steady


@pytest.mark.parametrize(("noise", "signal", "tells"), [(0.0, 0.1, True), (0.0, 0.0, False), (0.5, 0.0, True)])
def test_a_yardstick_knows_when_it_can_not_tell(noise: float, signal: float, tells: bool) -> None:
    assert Yardstick(noise, signal).tells is tells


def test_tokens_may_flip_at_a_tie() -> None:
    tie = answer((1, {1: -0.700, 2: -0.701}))
    assert Yardstick(0.0, 0.1).flipped(tie, answer((2, {2: -0.700, 1: -0.701}))) is None


def test_a_flip_against_a_clear_margin_is_found() -> None:
    clear = answer((1, {1: -0.1, 2: -3.0}))
    assert Yardstick(0.0, 0.1).flipped(clear, answer((2, {2: -0.1, 1: -3.0}))) == 0
