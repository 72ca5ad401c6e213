"""What the smoke plan says of a server: its connectors, and what its smoke tests must have called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework.records import Feature
from patches.serving_gate.planning import GPU_WORKER, _connectors, _features

MP = "LMCacheMPConnector"


def transfer(connector: str = MP, role: str = "kv_both", *inside: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        kv_connector=connector, kv_role=role, kv_connector_extra_config={"connectors": list(inside)} if inside else {}
    )


def config(**changes: Any) -> SimpleNamespace:
    parallel = {
        "data_parallel_backend": "mp", "data_parallel_size": 1, "enable_expert_parallel": False,
        "_api_process_count": 1, "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
    }  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **parallel | {name: changes[name] for name in parallel.keys() & changes.keys()}
        ),
        model_config=SimpleNamespace(is_moe=True, runner_type="generate"),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=changes.get("kv_cache_memory_bytes")),
        kv_transfer_config=changes.get("kv_transfer_config"),
    )


def features(*facts: dict[str, Any], patches: tuple[str, ...] = ("kv_probe",), **changes: Any) -> set[Feature]:
    return set(_features(config(**changes), patches, [{"facts": fact} for fact in facts]))


def test_lmcache_is_found_inside_a_connector_of_several() -> None:
    several = transfer(
        "MultiConnector", "kv_both", {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": MP, "kv_role": "kv_both"},
    )  # fmt: skip
    assert [name for name, _ in _connectors(several)] == ["MultiConnector", "NixlConnector", MP]
    assert Feature.LMCACHE in features(kv_transfer_config=several)


@pytest.mark.parametrize("inside", [None, {"kv_connector": MP, "kv_role": "kv_producer"}])
def test_a_connector_that_does_not_both_store_and_load_owes_nothing(inside: dict[str, Any] | None) -> None:
    found = transfer("MultiConnector", "kv_both", inside) if inside else transfer(MP, "kv_consumer")
    assert Feature.LMCACHE not in features(kv_transfer_config=found)
    assert not list(_connectors(None))


@pytest.mark.parametrize("mode", [Feature.ENGINE_DRIVEN, Feature.LMCACHE_DRIVEN])
def test_who_copies_is_what_the_workers_attest(mode: Feature) -> None:
    found = features({}, {"lmcache_transfer": mode.value})
    assert found & {Feature.ENGINE_DRIVEN, Feature.LMCACHE_DRIVEN} == {mode}


def test_only_a_command_parses_arguments_and_only_a_single_api_server_does_it_itself() -> None:
    assert features({"command": True}) == {Feature.PROBED, Feature.COMMAND, Feature.ONE_API_SERVER}
    assert features({"command": True}, _api_process_count=2) == {Feature.PROBED, Feature.COMMAND}
    assert features({"command": False}) == {Feature.PROBED}


def test_gpu_workers_profile_and_measure_where_nobody_gave_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = {Feature.PROFILED, Feature.MEASURED}
    assert features() & profiled == set()
    assert features(worker_cls=GPU_WORKER) & profiled == profiled
    assert features(worker_cls=GPU_WORKER, kv_cache_memory_bytes=1) & profiled == {Feature.PROFILED}
    monkeypatch.setenv("SPLINT_KV_BUDGET_RANKS", "1=12GiB")
    assert features(worker_cls=GPU_WORKER) & profiled == {Feature.PROFILED}
