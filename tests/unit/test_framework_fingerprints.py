"""Fingerprints follow the source text of one function or class, and nothing else."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from patches.framework import fingerprints, review
from patches.framework.errors import FingerprintError, TargetMissingError

NAME = "pretendlib.core:greet"


def digest(name: str = NAME) -> str:
    return str(fingerprints.take((name,))["targets"][name])


@pytest.mark.usefixtures("pretend")
def test_nothing_is_imported_to_take_a_fingerprint() -> None:
    digest()
    assert "pretendlib.core" not in sys.modules


def test_moving_a_function_keeps_its_fingerprint_and_changing_it_does_not(pretend: Any) -> None:
    before = digest()
    pretend.file.write_text("\n\n# moved\n" + pretend.file.read_text())
    assert digest() == before
    pretend.change('return "hello " + name', 'return "hello, " + name')
    assert digest() != before


def test_a_definition_under_if_or_try_is_found(pretend: Any) -> None:
    pretend.add(
        """
        if True:
            def guarded():
                return 1
        try:
            pass
        except OSError:
            def rescued(): return 2
        """
    )

    assert digest("pretendlib.core:guarded") != digest("pretendlib.core:rescued")


def test_a_second_reviewed_release_is_accepted_too(pretend: Any) -> None:
    pretend.review("greet", release="1.0")
    pretend.change('return "hello " + name', 'return "hi " + name')
    with pytest.raises(FingerprintError, match=r"1\.0"):
        fingerprints.check((NAME,))
    pretend.review("greet", release="1.1")
    fingerprints.check((NAME,))


def test_a_target_that_nobody_reviewed_is_refused_even_in_a_reviewed_file(pretend: Any) -> None:
    pretend.review("greet")
    with pytest.raises(FingerprintError, match=r"Shop\.price"):
        fingerprints.check(("pretendlib.core:Shop.price",))


def test_what_another_release_reviewed_is_not_taken_for_reviewed_in_this_ones_file(pretend: Any) -> None:
    pretend.review("greet", "Shop.price", release="1.0")
    pretend.change("return len(item)", "return 2 * len(item)")
    pretend.review("greet", release="1.1")
    fingerprints.check((NAME,))
    with pytest.raises(FingerprintError, match=r"Shop\.price"):
        fingerprints.check((NAME, "pretendlib.core:Shop.price"))


@pytest.mark.parametrize("changed", [False, True])
def test_writing_what_one_patch_stands_on_keeps_what_was_reviewed_for_the_others(
    pretend: Any, patch: Any, target: Any, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    records = (patch(target("greet", "shout")), patch(target("Shop.price", "double"), patch_id="cheap"))
    monkeypatch.setattr("patches.catalogue", lambda: records)
    monkeypatch.setattr("patches.PATCH_IDS", ("loud", "cheap"))
    monkeypatch.setattr("patches.framework.review.selected", lambda names: names)
    names = ("pretendlib.core:Shop.price", NAME)
    monkeypatch.setenv("SPLINT_PATCHES", "cheap")
    review.write("pretendlib")
    if changed:
        pretend.change("return len(item)", "return 2 * len(item)")
    monkeypatch.setenv("SPLINT_PATCHES", "loud")
    data = json.loads(review.write("pretendlib").read_text())
    assert tuple(sorted(data["targets"])) == names
    assert ("pretendlib.core" in data["files"]) is not changed
    fingerprints.check((NAME,))
    if changed:
        with pytest.raises(FingerprintError, match=r"Shop\.price"):
            fingerprints.check(names)


@pytest.mark.parametrize("name", ["pretendlib.core:nobody", "pretendlib.nowhere:greet", "nolibrary.core:greet"])
@pytest.mark.usefixtures("pretend")
def test_what_is_not_there_is_named(name: str) -> None:
    with pytest.raises(TargetMissingError):
        fingerprints.take((name,))
