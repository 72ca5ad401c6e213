"""What `make serve` starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoint.local.plan import CachePorts, Plan, cache_command, engine_command, engine_environment, option
from entrypoint.local.ready import ready_text

RUN = Path("run")
PORTS = CachePorts(messages=5555, http=5556, metrics=5557)


def plan(*arguments: str, model: str | None = None) -> Plan:
    return Plan(model=model, architecture="qwen3_moe", port=8000, arguments=arguments)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ((), None),
        (("--port", "1"), "1"),
        (("--port=1",), "1"),
        (("--port", "1", "--port=2"), "2"),
        (("--ports", "1"), None),
        (("--port",), None),
    ],
)
def test_an_option_is_read_as_the_server_would(arguments: tuple[str, ...], value: str | None) -> None:
    assert option(arguments, "--port") == value


def test_an_option_spelled_with_underscores_is_the_same_option() -> None:
    assert option(("--served_model_name", "x"), "--served-model-name") == "x"


def test_the_users_arguments_come_last_so_that_they_win() -> None:
    command = engine_command(plan("--kv-cache-dtype", "auto"), "/model", PORTS)
    assert option(command, "--kv-cache-dtype") == "auto"


def test_the_engine_is_told_where_the_lmcache_server_listens() -> None:
    transfer = json.loads(str(option(engine_command(plan(), "/model", PORTS), "--kv-transfer-config")))
    assert transfer["kv_connector"] == "LMCacheMPConnector"
    assert transfer["kv_connector_extra_config"]["lmcache.mp.port"] == PORTS.messages


def test_limits_of_the_tiny_model_are_not_put_on_another_model() -> None:
    assert option(engine_command(plan(), "/model", PORTS), "--max-model-len") == "2048"
    assert option(engine_command(plan(model="/model"), "/model", PORTS), "--max-model-len") is None


def test_the_lmcache_server_is_started_with_the_transfer_mode_that_the_cpu_backend_needs() -> None:
    assert option(cache_command(plan(), PORTS), "--supported-transfer-mode") == "auto"


def test_a_variable_that_the_user_has_set_stays() -> None:
    environment = engine_environment(plan(), RUN, {"VLLM_CPU_KVCACHE_SPACE": "7"})
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_engine_and_cache_share_a_run_directory_unless_the_user_named_one() -> None:
    assert engine_environment(plan(), RUN, {})["SPLINT_RUN_DIR"] == "run"
    assert engine_environment(plan(), RUN, {"SPLINT_RUN_DIR": "own"})["SPLINT_RUN_DIR"] == "own"


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ((), "http://127.0.0.1:8000"),
        (("--host", "0.0.0.0"), "http://127.0.0.1:8000"),
        (("--host=10.1.2.3", "--ssl-certfile", "c.pem"), "https://10.1.2.3:8000"),
        (("--host", "::1"), "http://[::1]:8000"),
    ],
)
def test_the_address_is_one_that_answers(arguments: tuple[str, ...], url: str) -> None:
    assert plan(*arguments).url == url


def test_the_ready_text_shows_where_the_key_goes_but_not_the_key() -> None:
    text = ready_text(plan("--api-key", "very-secret"), 1.0, 5555)
    assert "Authorization: Bearer $API_KEY" in text
    assert 'api_key="$API_KEY"' in text
    assert "very-secret" not in text
    assert "Authorization" not in ready_text(plan(), 1.0, 5555)


def test_a_hub_name_may_be_looked_up_on_the_hub() -> None:
    assert engine_environment(plan(), RUN, {})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine_environment(plan(model="some/model"), RUN, {})


def test_the_drain_is_what_vllm_was_told() -> None:
    assert plan("--shutdown-timeout", "30").drain_s == 30


@pytest.mark.parametrize(
    ("arguments", "disabled"), [((), True), (("--no-enforce-eager",), False), (("--no_enforce_eager",), False)]
)
def test_nothing_is_compiled_on_a_cpu_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], disabled: bool
) -> None:
    monkeypatch.setattr("entrypoint.local.plan._on_cpu", lambda: True)
    environment = engine_environment(plan(*arguments), RUN, {})
    assert ("TORCH_COMPILE_DISABLE" in environment) == disabled
