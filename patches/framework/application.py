"""Applying the patches in this process: whole or not at all, and undone together when one fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any

from patches.framework import fingerprints
from patches.framework.counters import Counters
from patches.framework.errors import AlreadyReplacedError, RefusedError, TargetMissingError
from patches.framework.judging import release_of
from patches.framework.libraries import in_range, is_before
from patches.framework.records import Patch, Seam, Target
from patches.framework.selection import selected
from patches.framework.timing import phase

__all__ = ["Application", "PatchState", "State"]

_ABSENT = object()


class State(str, Enum):
    """Where a patch stands in this process."""

    PENDING = "pending"
    APPLIED = "applied"
    INERT = "inert"
    NOT_APPLICABLE = "not_applicable"
    OFF = "off"
    REFUSED = "refused"


@dataclass
class Replacement:
    """One replaced attribute, and what undoing it takes."""

    target: Target
    owner: Any
    attribute: str
    original: Any
    replacement: Any

    def in_place(self) -> bool:
        return _raw(self.owner, self.attribute) is self.replacement

    def undo(self) -> None:
        if self.original is _ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


@dataclass
class PatchState:
    """A patch in this process: its state, the reason for it, and what it replaced."""

    patch: Patch
    state: State = State.PENDING
    reason: str = ""
    checked: bool = False
    replaced: dict[str, Replacement] = field(default_factory=dict)

    def settle(self, state: State, reason: str = "") -> None:
        """Note where the patch stands, and why."""
        self.state, self.reason = state, reason

    def undo(self) -> None:
        """Put every original back, last one first."""
        for replacement in reversed(list(self.replaced.values())):
            replacement.undo()
        self.replaced.clear()


class Application:
    """The patches of one process.

    ``refuse`` decides what a failure does: True rolls back everything that this process had applied and raises,
    False (report mode) rolls back the failing patch alone and notes why.
    """

    def __init__(self, patches: Iterable[Patch], *, refuse: bool, on_change: Callable[[], None] = lambda: None) -> None:
        self.states = {patch.id: PatchState(patch) for patch in patches}
        self.counters = Counters()
        self.refusal: RefusedError | None = None
        self._refuse = refuse
        self._on_change = on_change

    def select(self, names: tuple[str, ...]) -> None:
        """Turn off what ``SPLINT_PATCHES`` leaves out.

        Raises:
            SettingError: the selection is malformed.
        """
        for patch_id in set(self.states) - set(selected(names, tuple(self.states))):
            self.states[patch_id].settle(State.OFF, "left out by SPLINT_PATCHES")

    def modules(self) -> dict[str, list[tuple[PatchState, Target]]]:
        """The targets of every patch that is on, by the module whose import they wait for."""
        waiting: dict[str, list[tuple[PatchState, Target]]] = {}
        for state in self.states.values():
            if state.state is not State.OFF:
                for target in state.patch.targets_for(release_of(state.patch.library)):
                    waiting.setdefault(target.module, []).append((state, target))
        return waiting

    def imported(self, module: ModuleType) -> None:
        """Apply what waits for ``module``; called right after its import, before anybody binds its names.

        Raises:
            RefusedError: in enforce mode, when a needed patch does not fit; everything is rolled back first. From then
                on every target module refuses to be imported.
        """
        if self.refusal is not None:
            raise self.refusal
        for state, target in self.modules().get(module.__name__, ()):
            try:
                self._apply(state, target, module)
            except RefusedError as error:
                self._failed(state, error)
        self._on_change()

    def _apply(self, state: PatchState, target: Target, module: ModuleType) -> None:
        if not state.checked:
            _check(state)
            state.checked = True
        if state.state not in (State.PENDING, State.APPLIED) or target.name in state.replaced:
            return
        with phase("apply"):
            state.replaced[target.name] = self._replace(target, module)
        state.settle(State.APPLIED)

    def _replace(self, target: Target, module: ModuleType) -> Replacement:
        owner, attribute = _owner(module, target)
        original = _raw(owner, attribute)
        _check_original(target, module, original)
        call = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
        seam = Seam(target.name, None if call is _ABSENT else call, self.counters.add(target.name))
        factory_module, _, factory = target.wrapper.partition(":")
        replacement = getattr(import_module(factory_module), factory)(seam)
        if isinstance(original, (staticmethod, classmethod)):
            replacement = type(original)(replacement)
        setattr(owner, attribute, replacement)
        return Replacement(target, owner, attribute, original, replacement)

    def _failed(self, state: PatchState, error: RefusedError) -> None:
        error.remedy = error.remedy.replace("<id>", state.patch.id)
        if not self._refuse:
            state.undo()
            state.settle(State.REFUSED, str(error))
            return
        for other in self.states.values():
            other.undo()
            if other.state is State.APPLIED:
                other.settle(State.REFUSED, f"rolled back with {state.patch.id}")
        state.settle(State.REFUSED, str(error))
        self.refusal = error
        self._on_change()
        raise error

    def displaced(self) -> list[Replacement]:
        """Replacements that no longer stand where they were put."""
        return [found for state in self.states.values() for found in state.replaced.values() if not found.in_place()]

    def missed(self) -> list[Target]:
        """Targets whose module is imported although their patch was not applied to it."""
        return [
            target
            for module, waiting in self.modules().items()
            if module in sys.modules
            for state, target in waiting
            if state.state in (State.PENDING, State.APPLIED) and target.name not in state.replaced
        ]


def _check(state: PatchState) -> None:
    """Decide whether the patch is needed here, and whether its sources are the reviewed ones.

    Raises:
        FingerprintError: a source differs.
        TargetMissingError: a function or class is not there.
    """
    patch = state.patch
    reason = _condition(patch)
    if reason is not None:
        state.settle(State.NOT_APPLICABLE, reason)
        return
    version = release_of(patch.library)
    needed = in_range(version or "unknown", patch.releases)
    if needed is False:
        state.settle(State.INERT, _why_inert(patch, version or "unknown"))
        return
    with phase("fingerprints"):
        fingerprints.check(patch.reviewed_names(version))


def _why_inert(patch: Patch, version: str) -> str:
    if is_before(version, patch.releases):
        return f"{patch.library} {version} is older than what this patch is for ({patch.releases}): nothing is held"
    return f"{patch.library} {version} is outside {patch.releases}: {patch.retires}"


def _condition(patch: Patch) -> str | None:
    if not patch.condition:
        return None
    module, _, function = patch.condition.partition(":")
    reason: str | None = getattr(import_module(module), function)()
    return reason


def _raw(owner: Any, attribute: str) -> Any:
    """The attribute as it is stored, without the descriptor protocol."""
    return vars(owner).get(attribute, _ABSENT)


def _owner(module: ModuleType, target: Target) -> tuple[Any, str]:
    owner: Any = module
    *path, attribute = target.qualname.split(".")
    for name in path:
        owner = _raw(owner, name)
        if owner is _ABSENT:
            raise _missing(target, f"{target.module} has no {'.'.join(path)}")
    if target.defines == (_raw(owner, attribute) is not _ABSENT):
        state = "already defines" if target.defines else "has no"
        raise _missing(target, f"{target.module} {state} {target.qualname}")
    return owner, attribute


def _missing(target: Target, found: str) -> TargetMissingError:
    return TargetMissingError(
        found,
        f"{target.qualname} as in the reviewed releases",
        "Install a release that vllm-splint covers (see `splint patches`).",
    )


def _check_original(target: Target, module: ModuleType, original: Any) -> None:
    """Refuse to stand on somebody else's replacement: the object must come from the module's own file."""
    if original is _ABSENT or isinstance(original, type):
        return
    function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
    if target.name in fingerprints.reviewed(target.module.partition(".")[0]).decorated:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != module.__file__:
        raise AlreadyReplacedError(
            f"{target.name} is {function!r} from {getattr(code, 'co_filename', 'an unknown file')}",
            f"the function that {module.__file__} defines",
            "Another package replaced it first: remove that package, or leave the patch out with SPLINT_PATCHES.",
        )
