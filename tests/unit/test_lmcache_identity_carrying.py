"""An engine with LMCache starts only where its keys can be told apart, or where the operator has said otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework import process
from patches.framework.application import Application
from patches.framework.errors import EnvironmentRefusedError
from patches.lmcache_identity import PATCH, carrying
from patches.process_roster.wrappers import run_engine_core

WITH = SimpleNamespace(kv_transfer_config="kv_connector='LMCacheMPConnector'")
WITHOUT = SimpleNamespace(kv_transfer_config=None)


def start(monkeypatch: pytest.MonkeyPatch, release: str | None, config: Any, *, patches: tuple[str, ...] = ()) -> bool:
    """Whether an engine core starts with LMCache of this release installed."""
    application = Application([PATCH], refuse=True)
    application.select(patches)
    role = SimpleNamespace(
        application=application, take_role=lambda *_, **__: None, take_config=lambda _: None, refuse=_raise
    )
    monkeypatch.setattr(process, "_process", role)
    monkeypatch.setattr(carrying, "release_of", lambda _library: release)
    started: list[bool] = []
    seam = SimpleNamespace(original=lambda **_: started.append(True), count=lambda: None)
    run_engine_core(seam)(vllm_config=config)  # type: ignore[arg-type]
    return bool(started)


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("release", ["0.4.7", "0.5.2", "0.5.5"])
def test_a_release_without_the_patch_of_its_keys_is_refused(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    with pytest.raises(EnvironmentRefusedError, match=f"LMCache {release}, whose keys do not say"):
        start(monkeypatch, release, WITH)


@pytest.mark.parametrize(
    ("release", "config", "patches"),
    [
        ("0.5.6", WITH, ("all",)),
        ("0.5.5", WITHOUT, ("all",)),
        (None, WITHOUT, ("all",)),
        ("0.5.5", WITH, ("-lmcache_identity",)),
    ],
)
def test_all_others_start(
    monkeypatch: pytest.MonkeyPatch, release: str | None, config: Any, patches: tuple[str, ...]
) -> None:
    assert start(monkeypatch, release, config, patches=patches)
