"""Every SPLINT_* variable is known, or an error names the nearest one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patches.framework import settings, values
from patches.framework.errors import SettingError

UNPROTECTED = "SPLINT_LMCACHE_UNPROTECTED"


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(SettingError, match="Did you mean SPLINT_SMOKE_TIMEOUT_S"):
        settings.check_environment({"SPLINT_SMOKE_TIMEOUT": "3"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPLINT_MODE", "strict"),
        ("SPLINT_SMOKE", "yes"),
        ("SPLINT_SMOKE_TIMEOUT_S", "soon"),
        ("SPLINT_SMOKE_TIMEOUT_S", "-1"),
    ],
)
def test_a_malformed_value_is_an_error(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"{name}='{value}'"):
        settings.check_environment({name: value})


def test_what_kubernetes_sets_for_a_service_called_splint_is_left_alone() -> None:
    names = ("SPLINT_SERVICE_HOST", "SPLINT_SERVICE_PORT_HTTP", "SPLINT_PORT", "SPLINT_PORT_8000_TCP_ADDR")
    settings.check_environment(dict.fromkeys(names, "tcp://10.0.0.1:8000"))


def test_variables_of_others_are_left_alone() -> None:
    settings.check_environment({"PATH": "/bin", "SPLINTER": "1"})


def test_an_empty_value_counts_as_not_set() -> None:
    assert settings.get("SPLINT_MODE", {"SPLINT_MODE": ""}) == "enforce"


def test_every_default_can_be_read() -> None:
    for setting in settings.SETTINGS:
        setting.read({})


def test_what_may_go_without_checksums_is_a_name_that_means_something() -> None:
    assert settings.get(UNPROTECTED, {UNPROTECTED: "s3, plugin"}) == ("s3", "plugin")
    with pytest.raises(SettingError, match=r"'s3,mok'; wanted one or several of all, server, .* cachegen"):
        settings.check_environment({UNPROTECTED: "s3,mok"})


def test_the_docs_name_all_that_may_go_without_checksums() -> None:
    told = (
        (Path(__file__).parents[2] / "docs" / "lmcache.md").read_text().partition("## What may go without checksums")[2]
    )
    assert set(re.findall(r"`([\w-]+)`", told.partition("\n## ")[0])) >= set(values.UNPROTECTED)
