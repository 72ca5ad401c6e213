"""Patches go on whole or not at all, and only onto source that a person has reviewed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from patches.framework import aliases
from patches.framework.application import Application, State
from patches.framework.errors import AlreadyReplacedError, FingerprintError, SettingError, TargetMissingError


@pytest.fixture
def loud(patch: Callable[..., Any], target: Callable[..., Any]) -> Any:
    return patch(target("greet", "shout"), target("Shop.price", "double"))


def applied(application: Application, *modules: Any) -> Application:
    for module in modules:
        application.imported(module)
    return application


def test_a_reviewed_patch_is_applied_and_counts_its_calls(pretend: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    core = pretend.load()
    application = applied(Application([loud], refuse=True), core)
    assert core.greet("you") == "HELLO YOU"
    assert core.Shop().price("abc") == 6
    assert application.states["loud"].state is State.APPLIED
    assert application.counters.values() == {"pretendlib.core:greet": 1, "pretendlib.core:Shop.price": 1}


def test_a_second_application_changes_nothing(pretend: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    core = pretend.load()
    application = applied(Application([loud], refuse=True), core)
    once = core.greet
    applied(application, core)
    assert core.greet is once
    assert core.greet("you") == "HELLO YOU"


def test_a_static_method_stays_one(pretend: Any, patch: Any, target: Any) -> None:
    pretend.review("Shop.tax")
    core = pretend.load()
    applied(Application([patch(target("Shop.tax", "double"))], refuse=True), core)
    assert core.Shop.tax(50) == 10
    assert core.Shop().tax(50) == 10


def test_changed_source_is_refused_by_name_and_nothing_stays_applied(pretend: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    pretend.change("return len(item)", "return len(item) + 1")
    core = pretend.load()
    before = dict(vars(core)), dict(vars(core.Shop))
    application = Application([loud], refuse=True)
    with pytest.raises(FingerprintError, match=r"pretendlib\.core:Shop\.price"):
        application.imported(core)
    assert (dict(vars(core)), dict(vars(core.Shop))) == before
    assert application.states["loud"].state is State.REFUSED
    assert "SPLINT_PATCHES=-loud" in application.states["loud"].reason


def test_a_change_elsewhere_in_the_file_is_not_a_change_of_the_target(pretend: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    pretend.add("\ndef new():\n    return 1\n")
    core = pretend.load()
    applied(Application([loud], refuse=True), core)
    assert core.greet("you") == "HELLO YOU"


def test_a_failure_rolls_back_the_other_patches_of_the_process(
    pretend: Any, patch: Any, target: Any, loud: Any
) -> None:
    pretend.review("greet", "Shop.price")
    core = pretend.load()
    original = core.greet
    unreviewed = patch(target("closing", "shout", module="pretendlib.late"), patch_id="late")
    application = Application([loud, unreviewed], refuse=True)
    application.imported(core)
    with pytest.raises(FingerprintError, match="none; no release"):
        application.imported(pretend.load("pretendlib.late"))
    assert core.greet is original
    assert application.states["loud"].reason == "rolled back with late"


def test_a_patch_over_two_modules_is_checked_whole_before_its_first_target(
    pretend: Any, patch: Any, target: Any
) -> None:
    pretend.review("greet")
    wide = patch(target("greet", "shout"), target("closing", "shout", module="pretendlib.late"))
    core = pretend.load()
    with pytest.raises(FingerprintError, match="closing"):
        Application([wide], refuse=True).imported(core)
    assert core.greet("you") == "hello you"


def test_report_mode_rolls_back_the_failing_patch_alone(pretend: Any, patch: Any, target: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    unreviewed = patch(target("Shop.tax", "double"), patch_id="tax")
    core = pretend.load()
    application = applied(Application([unreviewed, loud], refuse=False), core)
    assert core.greet("you") == "HELLO YOU"
    assert application.states["tax"].state is State.REFUSED
    assert "Shop.tax" in application.states["tax"].reason


def test_a_missing_target_is_refused(pretend: Any, patch: Any, target: Any) -> None:
    pretend.review("greet")
    core = pretend.load()
    with pytest.raises(TargetMissingError, match="defines no farewell"):
        Application([patch(target("farewell", "shout"))], refuse=True).imported(core)


def test_an_attribute_is_defined_only_where_the_release_lacks_it(pretend: Any, patch: Any, target: Any) -> None:
    pretend.review("Shop")
    core = pretend.load()
    adding = patch(target("Shop.sale", "discount", reviewed=("Shop",), defines=True))
    applied(application := Application([adding], refuse=True), core)
    assert core.Shop().sale("abcd") == 3
    application.states["loud"].undo()
    assert not hasattr(core.Shop, "sale")
    core.Shop.sale = lambda _self, _item: 0
    with pytest.raises(TargetMissingError, match="already defines"):
        Application([adding], refuse=True).imported(core)


def test_somebody_elses_replacement_is_not_covered_up(pretend: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    core = pretend.load()
    core.greet = lambda name: name
    with pytest.raises(AlreadyReplacedError, match=r"pretendlib\.core:greet"):
        Application([loud], refuse=True).imported(core)


def test_a_decorated_function_is_known_by_what_it_wraps(pretend: Any, patch: Any, target: Any) -> None:
    pretend.review("cached")
    core = pretend.load()
    applied(Application([patch(target("cached", "shout"))], refuse=True), core)
    assert core.cached("you") == "CACHED YOU"


def test_outside_its_releases_a_patch_is_inert_and_says_why(pretend: Any, patch: Any, target: Any) -> None:
    pretend.review("greet")
    core = pretend.load()
    application = applied(Application([patch(target("greet", "shout"), releases="<1")], refuse=True), core)
    assert core.greet("you") == "hello you"
    assert application.states["loud"].state is State.INERT
    assert "pretendlib 1.0 is outside <1" in application.states["loud"].reason


def test_a_condition_that_does_not_hold_is_reported(pretend: Any, patch: Any, target: Any) -> None:
    pretend.review("greet")
    core = pretend.load()
    conditional = patch(target("greet", "shout"), condition="platform:python_implementation")
    application = applied(Application([conditional], refuse=True), core)
    assert application.states["loud"].state is State.NOT_APPLICABLE
    assert application.states["loud"].reason == "CPython"


def test_what_is_turned_off_is_reported_as_off(pretend: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    core = pretend.load()
    application = Application([loud], refuse=True)
    application.select(("-loud",))
    applied(application, core)
    assert core.greet("you") == "hello you"
    assert application.states["loud"].state is State.OFF


@pytest.mark.parametrize("names", [("lod",), ("-lod",), ("loud", "-loud")])
def test_a_selection_that_names_no_patch_is_an_error(loud: Any, names: tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match="loud"):
        Application([loud], refuse=True).select(names)


def test_a_stale_alias_is_found_and_rebound(pretend: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    core = pretend.load()
    late = pretend.load("pretendlib.late")
    late.hello = core.greet
    application = applied(Application([loud], refuse=True), core)
    assert late.hello("you") == "hello you"
    rebound = aliases.rebind(found for state in application.states.values() for found in state.replaced.values())
    assert rebound == ["pretendlib.late.hello"]
    assert late.hello("you") == "HELLO YOU"


def test_a_patch_that_was_displaced_or_missed_is_noticed(pretend: Any, loud: Any) -> None:
    pretend.review("greet", "Shop.price")
    core = pretend.load()
    application = Application([loud], refuse=True)
    assert [found.qualname for found in application.missed()] == ["greet", "Shop.price"]
    applied(application, core)
    assert application.missed() == []
    core.greet = len
    assert [found.target.qualname for found in application.displaced()] == ["greet"]
    assert "pretendlib.core" in sys.modules
