"""system_fingerprint on vLLM's own functions: with the patch set by default, the operator's own form otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.utils import fingerprint

from patches.framework import roster
from patches.patch_identity.wrappers import identity

SERVE = ["vllm", "serve", "model"]
CONFIG = SimpleNamespace(
    compute_hash=lambda: "0123456789abcdef",
    parallel_config=SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=2, enable_expert_parallel=True
    ),
)


@pytest.fixture(autouse=True)
def default_mode() -> Iterator[None]:
    yield
    fingerprint.set_default_fingerprint_mode("full", None)


def said(monkeypatch: pytest.MonkeyPatch, *flags: str, mode: str = "full", value: str | None = None) -> Any:
    """What a server started with ``flags`` says; ``mode`` and ``value`` are what vLLM made of them."""
    monkeypatch.setattr(sys, "argv", [*SERVE, *flags])
    fingerprint.set_default_fingerprint_mode(mode, value)
    return fingerprint.get_system_fingerprint(CONFIG)


def test_by_default_it_names_the_patch_set_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLINT_PATCHES", raising=False)
    whole, digest = said(monkeypatch).rsplit("-", 1)
    assert whole.endswith("-dp2-ep-01234567+splint-0.1.0")
    assert digest == roster.patch_set_digest(("all",))


def test_another_selection_is_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLINT_PATCHES", raising=False)
    usual = identity()
    monkeypatch.setenv("SPLINT_PATCHES", "-kv_budget")
    assert identity() != usual


@pytest.mark.parametrize(
    ("flags", "mode", "value", "answer"),
    [
        (("--fingerprint-mode", "none"), "none", None, None),
        (("--fingerprint-mode", "custom", "--fingerprint-value", "mine"), "custom", "mine", "mine"),
        ((), "custom", "mine", "mine"),
    ],
)
def test_the_operators_own_form_wins(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], mode: str, value: str | None, answer: str | None
) -> None:
    assert said(monkeypatch, *flags, mode=mode, value=value) == answer


@pytest.mark.parametrize("flags", [("--fingerprint-mode", "full"), ("--fingerprint_mode=hash",)])
def test_a_form_that_is_asked_for_by_name_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    assert "splint" not in said(monkeypatch, *flags, mode="full")
