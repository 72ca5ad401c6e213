"""compose.yaml as it is written: who reaches whom, what survives what, and that every variable is explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
CACHES = ("lmcache", "lmcache-cpu")
SERVING = ("vllm", "vllm-cpu", "head", "node")
VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    return loaded


def _networks(service: dict[str, Any]) -> set[str]:
    return set(service.get("networks", ["default"]))


@pytest.mark.parametrize("name", CACHES)
def test_the_lmcache_server_is_published_nowhere_and_reached_by_vllm_alone(compose: dict[str, Any], name: str) -> None:
    cache = compose["services"][name]
    assert "ports" not in cache
    assert "network_mode" not in cache
    assert _networks(cache) == {"cache", "second-level"}
    assert all(compose["networks"][network]["internal"] for network in _networks(cache))
    beside = {other for other, service in compose["services"].items() if "cache" in _networks(service)}
    assert beside == {"vllm", "vllm-cpu", *CACHES}
    assert {other for other, service in compose["services"].items() if "second-level" in _networks(service)} == {
        "redis",
        *CACHES,
    }


@pytest.mark.parametrize("name", SERVING)
def test_docker_waits_longer_than_the_drain_before_it_kills(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    drain = re.search(r"--shutdown-timeout \$\{DRAIN_SECONDS:-(\d+)\}", service["command"])
    grace = re.fullmatch(r"\$\{STOP_GRACE:-(\d+)s\}", service["stop_grace_period"])
    assert drain is not None
    assert grace is not None
    assert int(grace[1]) >= int(drain[1]) + 30


@pytest.mark.parametrize("name", SERVING)
def test_a_server_that_ended_with_code_0_is_started_again(compose: dict[str, Any], name: str) -> None:
    assert compose["services"][name]["restart"] == "${RESTART:-unless-stopped}"


def test_every_service_has_a_health_check_of_its_own_or_of_its_image(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        ours = service.get("build", {}).get("target") in ("cpu", "gpu") and "entrypoint" not in service
        assert ours or "test" in service["healthcheck"], name


def test_every_variable_is_explained_with_its_default() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    explained = set(re.findall(r"^#?([A-Z_]+)=(.*)$", example, re.MULTILINE))
    used = set(VARIABLE.findall(COMPOSE.read_text(encoding="utf-8")))
    assert used - explained == SMALL_DEFAULTS


SMALL_DEFAULTS = {
    ("MODEL", "/models/tiny-moe"),
    ("DATA_PARALLEL_SIZE", "2"),
    ("KV_CACHE_DTYPE", "fp8_e5m2"),
    ("CACHE_GIB", "1"),
}
"""The profiles without a GPU have their own, which the comments name."""


def test_the_tracked_env_file_starts_the_gpu_profile_and_holds_no_secret() -> None:
    lines = [line for line in (ROOT / ".env").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines == ["COMPOSE_PROFILES=gpu"]
