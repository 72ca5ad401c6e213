"""`make review` tells what is to be read from what was read, and writes nothing for a patch that is not there."""

from __future__ import annotations

from typing import Any

import pytest
from reviewing import __main__ as command
from reviewing import readings

from patches.framework import fingerprints

NAME = "vllm.v1.core.kv_cache_utils:no_such_function"


def found(text: str) -> dict[str, str]:
    return {"digest": text, "text": text, "place": "file.py:1"}


def test_a_text_is_to_be_read_once_and_the_next_one_as_a_difference() -> None:
    shelf = readings.Shelf()
    first = shelf.add("1.0", NAME, found("a\nb"))
    same = shelf.add("1.1", NAME, found("a\nb"))
    other = shelf.add("1.2", NAME, found("a\nc"))
    again = shelf.add("1.3", NAME, found("a\nb"))
    assert [bool(reading.like) for reading in (first, same, other, again)] == [False, True, False, True]
    assert same.like == again.like == "1.0"
    assert "TO READ" in str(other)
    assert other.diff().splitlines()[-3:] == [" a", "-b", "+c"]


def test_what_a_release_file_holds_needs_no_second_reading() -> None:
    name = "vllm.model_executor.layers.attention.mla_attention:MLAAttention.get_kv_cache_spec"
    (digest,) = fingerprints.reviewed("vllm").targets[name]
    reading = readings.Shelf().add("9.9", name, {**found("text"), "digest": digest})
    assert reading.like == "0.25.0"


def test_a_patch_is_reviewed_in_the_locked_releases_of_its_range(patch: Any) -> None:
    assert readings.covered(patch(releases=">=0.25,<0.26")) == ("0.25.0", "0.25.1")


@pytest.mark.parametrize(("names", "words"), [("", "no patch is named"), ("mla_kv_spec,nope", "is called nope")])
def test_a_patch_that_is_not_there_is_named_and_nothing_is_written(
    names: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "readings", pytest.fail)
    assert command.main(["--patches", names]) == 2
    assert words in capsys.readouterr().err
