"""A library whose version nobody reviewed is judged by its sources; one whose version was reviewed by both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import patches
from patches.framework import fingerprints, judging
from patches.framework.application import Application, State
from patches.framework.errors import FingerprintError
from patches.framework.libraries import installed_version

UNKNOWN = ["0.1.dev1+gabc1234", "1.0.1", "2.0+acme", "nightly"]


@pytest.fixture
def rebuilt(pretend: Any, patch: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The library under another version; its catalogue stands on greet (all releases) and Shop.price (1.0 only)."""
    needed = patch(target("greet", "shout"), patch_id="process_roster", releases=">=0.1")
    old = patch(target("Shop.price", "double"), patch_id="kv_budget", releases="==1.0")
    monkeypatch.setattr(patches, "catalogue", lambda: (needed, old))

    def rebuild(version: str) -> Application:
        for metadata in (pretend.folder / "pretendlib-1.0.dist-info" / "METADATA",):
            metadata.write_text(f"Metadata-Version: 2.1\nName: pretendlib\nVersion: {version}\n")
        installed_version.cache_clear()
        judging._judged.cache_clear()
        return Application((needed, old), refuse=True)

    yield rebuild
    judging._judged.cache_clear()


@pytest.mark.parametrize("version", UNKNOWN)
def test_an_unknown_version_with_the_sources_of_a_reviewed_release_is_judged_as_that(
    pretend: Any, rebuilt: Any, version: str
) -> None:
    pretend.review("greet", release="0.9")
    pretend.review("greet", "Shop.price", release="1.0")
    application = rebuilt(version)
    assert judging.release_of("pretendlib") == "1.0"
    application.imported(pretend.load())
    assert {state.state for state in application.states.values()} == {State.APPLIED}


def test_targets_are_those_of_the_release_that_it_is_judged_as(pretend: Any, rebuilt: Any, target: Any) -> None:
    """A target that only another release has must not keep a rebuilt library from being patched."""
    pretend.review("greet", "Shop.price", release="1.0")
    application = rebuilt("nightly")
    state = application.states["process_roster"]
    gone = target("no_such", "shout", releases=">=1.1")
    object.__setattr__(state.patch, "targets", (*state.patch.targets, gone))
    application.imported(pretend.load())
    assert state.state is State.APPLIED


def test_a_moved_function_in_a_rebuilt_file_is_still_the_reviewed_one(pretend: Any, rebuilt: Any) -> None:
    pretend.review("greet", "Shop.price", release="1.0")
    pretend.add("\n\ndef of_our_own():\n    return 1\n")
    rebuilt("2.0+acme")
    assert judging.release_of("pretendlib") == "1.0"


@pytest.mark.parametrize("version", UNKNOWN)
def test_a_changed_function_makes_it_no_reviewed_release_and_is_refused(
    pretend: Any, rebuilt: Any, version: str
) -> None:
    pretend.review("greet", "Shop.price", release="1.0")
    pretend.change('"hello "', '"hi "')
    application = rebuilt(version)
    assert judging.release_of("pretendlib") == version
    with pytest.raises(FingerprintError, match="greet"):
        application.imported(pretend.load())


def test_of_two_releases_with_these_sources_it_is_the_newest(pretend: Any, rebuilt: Any) -> None:
    pretend.review("greet", release="9.0")
    pretend.review("greet", release="10.0")
    rebuilt("nightly")
    assert judging.release_of("pretendlib") == "10.0"


def test_a_release_of_which_less_was_reviewed_than_its_patches_need_is_none_to_be_taken_for(
    pretend: Any, rebuilt: Any
) -> None:
    pretend.review("greet", release="1.0")
    rebuilt("nightly")
    assert judging.release_of("pretendlib") == "nightly"


def test_a_local_version_of_a_reviewed_release_keeps_its_version_and_is_held_to_the_digests(
    pretend: Any, rebuilt: Any
) -> None:
    pretend.review("greet", "Shop.price", release="1.0")
    pretend.change("len(item)", "len(item) + 1")
    application = rebuilt("1.0+acme")
    assert judging.release_of("pretendlib") == "1.0+acme"
    with pytest.raises(FingerprintError, match=r"Shop\.price"):
        application.imported(pretend.load())


def test_a_library_without_a_reviewed_file_keeps_its_version(rebuilt: Any) -> None:
    rebuilt("2.0")
    assert judging.release_of("pretendlib") == "2.0"


def test_a_library_that_is_absent_has_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "installed_version", lambda _: None)
    assert judging.release_of("vllm") is None


@pytest.mark.parametrize("library", ["vllm", "lmcache"])
def test_the_installed_libraries_under_another_version_are_what_they_are(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = installed_version(library)
    assert installed is not None
    monkeypatch.setattr(judging, "installed_version", lambda _: "0.1.dev7+gabc1234")
    judging._judged.cache_clear()
    assert judging.release_of(library) == installed.partition("+")[0]


def test_every_reviewed_file_says_which_release_it_is() -> None:
    for path in fingerprints.REVIEWED_FOLDER.glob("*.json"):
        assert json.loads(path.read_text())["release"] == path.stem.partition("-")[2]
