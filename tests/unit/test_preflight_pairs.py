"""Which releases go together: every row, and what is told where none does."""

from __future__ import annotations

from itertools import product

import pytest

import patches
from entrypoint.preflight import pairs
from entrypoint.preflight.pairs import BROKEN, GOOD, IN_PROCESS, LMCACHE, MULTI_PROCESS, VLLM, Good, Use, judge, nearest
from patches.framework import fingerprints
from patches.framework.libraries import in_range

EVERY = [
    Use(vllm, lmcache, connector, hybrid, latent)
    for vllm, lmcache, connector, hybrid, latent in product(
        VLLM, LMCACHE, (MULTI_PROCESS, IN_PROCESS), (False, True), (False, True)
    )
]
FACTS = [
    (Use("0.32.0", "0.5.6", MULTI_PROCESS), ""),
    (Use("0.32.0+cpu", "0.5.6", MULTI_PROCESS, hybrid=True), ""),
    (Use("0.33.0", "0.5.6", MULTI_PROCESS, latent=True), ""),
    (Use("0.22.1", "0.5.6", MULTI_PROCESS, hybrid=True), "not covered"),
    (Use("0.30.0", "0.5.5", MULTI_PROCESS), "not covered"),
    (Use("0.32.0", "0.5.5", MULTI_PROCESS), "the patches of LMCache are for LMCacheMPConnector with vLLM >=0.32"),
    (Use("0.25.1", "0.4.7", IN_PROCESS), "not covered"),
    (Use("0.33.0", "0.5.6", IN_PROCESS, latent=True), "never run"),
    (Use("0.30.0", "0.4.6", MULTI_PROCESS), "LMCache before 0.4.7 is not covered"),
    (Use("0.29.0", "0.5.4", IN_PROCESS, latent=True), "swallows the error and guesses"),
    (Use("0.19.1", "0.5.6", MULTI_PROCESS), "imports names that this vLLM does not have"),
    (Use("0.25.1", "0.5.2", MULTI_PROCESS), "a load that failed is reported as finished"),
    (Use("0.28.0", "0.5.5", MULTI_PROCESS, hybrid=True), "wrong tokens on every hit"),
    (Use("0.21.0", "0.5.6", MULTI_PROCESS, hybrid=True), "the connector in this vLLM can't serve hybrid models"),
    (Use("0.25.1", "0.5.6", IN_PROCESS, hybrid=True), "the in-process connector can't serve hybrid models"),
    (Use("0.26.0", "0.5.2", IN_PROCESS), "takes keys and values of vLLM's packed layout"),
    (Use("0.34.0", "0.5.6", MULTI_PROCESS), "not covered"),
    (Use("0.32.0", "0.5.7", MULTI_PROCESS), "not covered"),
    (Use("0.21.0", "0.5.6", MULTI_PROCESS), "not covered"),
    (Use("0.33.1.dev7", "0.5.6", MULTI_PROCESS), ""),
]


@pytest.mark.parametrize(("use", "why"), FACTS, ids=lambda value: str(value) if isinstance(value, str) else value.vllm)
def test_a_pair_is_judged_as_the_facts_have_it(use: Use, why: str) -> None:
    found = judge(use)
    assert (found == []) if not why else any(why in fault for fault in found)


@pytest.mark.parametrize("good", GOOD, ids=lambda good: f"{good.connector} {good.vllm} {good.lmcache}")
def test_every_good_row_is_needed_and_nothing_contradicts_it(good: Good, monkeypatch: pytest.MonkeyPatch) -> None:
    covered = [use for use in EVERY if good.covers(use)]
    assert covered
    assert all(judge(use) == [] for use in covered)
    monkeypatch.setattr(pairs, "GOOD", tuple(other for other in GOOD if other is not good))
    assert any(judge(use) for use in covered)


HOLDING = [patch for patch in patches.catalogue() if patch.library == "lmcache" or patch.id == "kv_profile"]
"""The patches without which keys are bare or objects unchecked: the engine refuses a release that they are not for."""


@pytest.mark.parametrize("use", EVERY, ids=str)
def test_a_pair_is_good_only_where_every_patch_that_holds_it_applies(use: Use) -> None:
    releases = {"vllm": use.vllm, "lmcache": use.lmcache}
    inert = [patch.id for patch in HOLDING if in_range(releases[patch.library], patch.releases) is not True]
    assert not (inert and judge(use) == []), f"called good, but {inert} are not for it"


def test_what_is_good_has_been_reviewed() -> None:
    for use in EVERY:
        if judge(use) == []:
            for library, release in (("vllm", use.vllm), ("lmcache", use.lmcache)):
                assert (fingerprints.REVIEWED_FOLDER / f"{library}-{release}.json").exists(), f"{library} {release}"


@pytest.mark.parametrize("row", range(len(BROKEN)))
def test_every_broken_row_speaks_for_a_fact(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {use for use, why in FACTS if why and why in BROKEN[row].why}
    assert told
    monkeypatch.setattr(pairs, "BROKEN", BROKEN[:row] + BROKEN[row + 1 :])
    assert all(BROKEN[row].why not in judge(use) for use in told)


@pytest.mark.parametrize("use", [use for use, why in FACTS if why], ids=lambda use: f"{use.vllm} {use.lmcache}")
def test_what_is_told_to_install_is_good(use: Use) -> None:
    assert judge(nearest(use)) == []


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (Use("0.30.0", "0.5.2", MULTI_PROCESS), "Install vLLM 0.32.0 with LMCache 0.5.6."),
        (Use("0.19.1", "0.5.6", MULTI_PROCESS), "Install vLLM 0.32.0 with LMCache 0.5.6."),
        (Use("0.34.0", "0.5.6", MULTI_PROCESS), "Install vLLM 0.33.0 with LMCache 0.5.6."),
        (Use("0.32.0", "0.5.7", MULTI_PROCESS), "Install LMCache 0.5.6; vLLM 0.32.0 may stay."),
        (Use("0.32.0", "0.5.6", IN_PROCESS, hybrid=True), "Use LMCacheMPConnector."),
        (Use("0.32.0", "0.5.5", MULTI_PROCESS), "Install LMCache 0.5.6; vLLM 0.32.0 may stay."),
        (Use("0.30.0", "0.5.6", IN_PROCESS), "Install vLLM 0.32.0 with LMCache 0.5.6. Use LMCacheMPConnector."),
    ],
)  # fmt: skip
def test_the_nearest_good_pair_is_named(use: Use, told: str) -> None:
    assert pairs.remedy(use) == told
