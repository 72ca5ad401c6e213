"""Each rule of the doctor: a configuration that it finds fault with, and one that it does not."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from entrypoint.doctor import parsing
from entrypoint.doctor.reading import Reading
from entrypoint.doctor.rule import HELD, LEVELS
from entrypoint.doctor.rules import RULES
from entrypoint.doctor.rules.lmcache import server_addresses
from entrypoint.preflight.subject import Subject
from patches import PATCH_IDS
from patches.framework.arguments import Arguments

MOE = {"num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
DENSE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"kv_lora_rank": 512, "num_attention_heads": 16}
SPARSE = {**LATENT, "index_topk": 2048, "n_routed_experts": 256}
FP8_KV = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
CPU = "0.32.0+cpu"


@dataclass(frozen=True)
class Case:
    """Words after ``vllm serve MODEL``, variables, releases, and the model's ``config.json``."""

    words: str = ""
    env: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: DENSE)
    vllm: str = "0.32.0"
    lmcache: str | None = "0.5.6"


def transfer(connector: str = "LMCacheMPConnector", extra: dict[str, Any] | None = None, **fields: Any) -> str:
    config = {"kv_connector": connector, "kv_role": "kv_both", **fields}
    if extra is not None:
        config["kv_connector_extra_config"] = extra
    return f"--kv-transfer-config {shlex.quote(json.dumps(config))}"


V1 = transfer("LMCacheConnectorV1")
MP = transfer()


def v1(**settings: Any) -> str:
    return transfer("LMCacheConnectorV1", {f"lmcache.{name}": value for name, value in settings.items()})


# Of each rule: what it must find, and what comes close and must not be found.
CASES: dict[str, tuple[Case, Case]] = {
    "reach:VLLM_USE_RUST_FRONTEND": (
        Case(env={"VLLM_USE_RUST_FRONTEND": "1"}), Case(env={"VLLM_USE_RUST_FRONTEND": "0"}),
    ),
    "reach:LMCACHE_USE_UPSTREAM_MP": (
        Case(env={"LMCACHE_USE_UPSTREAM_MP": "0"}), Case(env={"LMCACHE_USE_UPSTREAM_MP": ""}),
    ),
    "reach:grpc": (Case("--grpc"), Case("--port 5")),
    "reach:use_native": (Case(transfer(extra={"use_native": True})), Case(transfer(extra={"use_native": False}))),
    "plugin-kept-out": (Case(env={"VLLM_PLUGINS": "x"}), Case(env={"VLLM_PLUGINS": "x,vllm_splint"})),
    "config-joined": (Case("--config=/x.yaml"), Case("--config /x.yaml")),
    "abrupt-end": (Case(), Case("--shutdown-timeout 30")),
    "dev-mode": (Case(env={"VLLM_SERVER_DEV_MODE": "1"}), Case(env={"VLLM_SERVER_DEV_MODE": "0"})),
    "insecure-serialisation": (Case(env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}), Case()),
    "lora-updates-several-servers": (
        Case("-dp 2", {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}),
        Case("-dp 2 --api-server-count 1", {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}),
    ),
    "api-key-paths": (Case("--api-key k"), Case()),
    "uncounted": (Case("--disable-log-stats"), Case()),
    "headless": (Case("--headless"), Case()),
    "connector-from-elsewhere": (
        Case(transfer("Mine", kv_connector_module_path="my.connector")),
        Case(transfer(kv_connector_module_path="lmcache.integration.vllm.lmcache_mp_connector")),
    ),
    "experts-split": (Case("-dp 2", model=MOE), Case("-dp 2 -ep", model=MOE)),
    "experts-of-a-dense-model": (Case("-ep"), Case("-ep", model=MOE)),
    "dense-ranks": (Case("-dp 2"), Case("-dp 2 -ep", model=MOE)),
    "heads-do-not-divide": (Case("-tp 3"), Case("-tp 2")),
    "kv-copied": (Case("-tp 4"), Case("-tp 2")),
    "eplb-without-ep": (Case("--enable-eplb", model=MOE), Case("--enable-eplb -ep", model=MOE)),
    "eplb-outside-the-budget": (Case("--enable-eplb -ep -dp 2", model=MOE), Case("-ep -dp 2", model=MOE)),
    "deepep-outside-the-budget": (
        Case("--all2all-backend deepep_low_latency"), Case("--all2all-backend deepep_high_throughput"),
    ),
    "draft-hang": (
        Case("""-dp 2 --speculative-config '{"method": "mtp"}'""", model=MOE),
        Case("""--speculative-config '{"method": "mtp"}'""", model=MOE),
    ),
    "elastic-unmeasured": (Case("--enable-elastic-ep"), Case("-ep", model=MOE)),
    "moriio-read": (
        Case(f"-dp 2 {transfer('MoRIIOConnector', {'read_mode': 'true'})}", vllm="0.25.1"),
        Case(f"-dp 2 {transfer('MoRIIOConnector', {'read_mode': 'false'})}", vllm="0.25.1"),
    ),
    "engine-id-collides": (
        Case(f"-dp 2 --data-parallel-start-rank 1 {transfer(engine_id='a')}", vllm="0.22.1"),
        Case(f"-dp 2 --data-parallel-start-rank 1 {transfer()}", vllm="0.22.1"),
    ),
    "packed-latent-kv": (
        Case("--kv-cache-dtype fp8", model=SPARSE, vllm="0.25.1"),
        Case("--kv-cache-dtype fp8", model=LATENT, vllm="0.25.1"),
    ),
    "turboquant-kv": (
        Case("--kv-cache-dtype turboquant_k8v4", vllm="0.25.0"), Case("--kv-cache-dtype fp8", vllm="0.25.0"),
    ),
    "experts-unmeasured": (Case("-dp 2 -ep", model=MOE, vllm="0.30.0"), Case("", model=MOE, vllm="0.30.0")),
    "one-expert-rank": (
        Case("-dp 2 -ep", model=MOE), Case("-dp 2 -ep", {"VLLM_RANDOMIZE_DP_DUMMY_INPUTS": "1"}, model=MOE),
    ),
    "graphs-overestimated": (Case("-dp 2", model=MOE), Case("-dp 2 --enforce-eager", model=MOE)),
    "graphs-unmeasured": (Case(vllm="0.28.0"), Case("--enforce-eager", vllm="0.28.0")),
    "pinned-unchecked": (Case("-tp 2 --num-gpu-blocks-override 100"), Case("--num-gpu-blocks-override 100")),
    "exact-fit": (Case("--num-gpu-blocks-override 8", vllm="0.28.0"), Case("", vllm="0.28.0")),
    "fitted-length": (Case("-dp 2 --max-model-len -1"), Case("-dp 2 --max-model-len 4096")),
    "startup-plan": (
        Case("-dp 2", {"VLLM_ENABLE_STARTUP_PLAN": "1"}), Case("", {"VLLM_ENABLE_STARTUP_PLAN": "1"}),
    ),
    "hybrid-ranks": (Case("-dp 2", model=HYBRID), Case("-dp 2")),
    "hybrid-stages": (Case("-pp 2", model=HYBRID), Case("-pp 2")),
    "unequal-pools": (Case("-dp 2 -ep", model=MOE), Case("-dp 2 -ep --kv-cache-memory-bytes 1000000", model=MOE)),
    "silent-rank": (Case("-dp 2 -ep", model=MOE), Case("-dp 2")),
    "pinned-otherwise": (
        Case("--kv-cache-dtype fp8", {"SPLINT_KV_DTYPE": "bfloat16"}), Case("", {"SPLINT_KV_DTYPE": "bfloat16"}),
    ),
    "declared-kv-dtype": (Case(model=FP8_KV), Case("--kv-cache-dtype bfloat16", model=FP8_KV)),
    "e5m2-checkpoint": (
        Case("--kv-cache-dtype fp8_e5m2", model={"quantization_config": {"quant_method": "fp8"}}),
        Case("--kv-cache-dtype fp8_e5m2", model={"quantization_config": {"quant_method": "compressed-tensors"}}),
    ),
    "scales-in-no-key": (
        Case(f"--calculate-kv-scales {MP}", vllm="0.25.1"), Case("--calculate-kv-scales", vllm="0.25.1"),
    ),
    "int4-window": (
        Case("--kv-cache-dtype int4_per_token_head", model={"sliding_window": 512}, vllm="0.25.1"),
        Case("--kv-cache-dtype int4_per_token_head", vllm="0.25.1"),
    ),
    "in-process-packed": (Case(V1), Case(V1, model=LATENT)),
    "in-process-retired": (Case(V1, vllm="0.25.1"), Case(MP, vllm="0.25.1")),
    "in-process-hybrid": (Case(V1, model=HYBRID), Case(MP, model=HYBRID)),
    "in-process-sparse": (Case(V1, model=SPARSE), Case(V1, model=LATENT)),
    "in-process-packed-latent": (
        Case(f"{V1} --kv-cache-dtype fp8_ds_mla", model=LATENT),
        Case(f"{MP} --kv-cache-dtype fp8_ds_mla", model=LATENT),
    ),
    "in-process-cpu": (Case(V1, vllm=CPU), Case(MP, vllm=CPU)),
    "engine-driven-hybrid": (Case(MP, model=HYBRID, vllm=CPU), Case(MP, vllm=CPU)),
    "lossy-serde": (
        Case(f"{v1(remote_serde='cachegen')} --kv-cache-dtype fp8"),
        Case(f"{v1(remote_serde='naive')} --kv-cache-dtype fp8"),
    ),
    "blending": (Case(v1(enable_blending=True)), Case(v1(enable_blending=False))),
    "same-bytes": (Case(f"{MP} --kv-cache-dtype fp8_e5m2"), Case(MP)),
    "no-dtype-in-key": (Case(MP), Case(V1)),
    "adapters-in-no-key": (Case(f"{MP} --enable-lora"), Case("--enable-lora")),
    "context-parallel-in-no-key": (Case(f"{MP} -dcp 2", lmcache="0.5.2"), Case(MP, lmcache="0.5.2")),
    "failed-loads-count": (Case(MP, lmcache="0.5.2"), Case(V1, lmcache="0.5.2")),
    "store": (Case(v1(remote_url="lm://host:1")), Case(v1(remote_url="s3://bucket"))),
    "disk-shared": (Case(f"-dp 2 {v1(local_disk='/cache')}"), Case(v1(local_disk="/cache"))),
    "load-failure-fails": (Case(MP), Case(transfer(kv_load_failure_policy="recompute"))),
    "load-failure-asked-for": (Case(transfer(kv_load_failure_policy="fail")), Case(MP)),
    "server-over-grpc": (
        Case(transfer(extra={"lmcache.mp.host": "grpc://cache"})), Case(transfer(extra={"lmcache.mp.host": "tcp://grpc"})),
    ),
    "server-silent": (
        Case(transfer(extra={"lmcache.mp.port": 1})), Case(transfer(extra={"lmcache.mp.autostart": True})),
    ),
    "cpu-experts": (Case("-dp 2 -ep", model=MOE, vllm=CPU), Case("-dp 2 -ep", model=MOE)),
    "cpu-memory": (Case("-dp 2", vllm=CPU), Case("-dp 2", {"VLLM_CPU_KVCACHE_SPACE": "1"}, vllm=CPU)),
    "cpu-threads": (
        Case("-tp 64", model={}, vllm=CPU),
        Case("-tp 64", {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, model={}, vllm=CPU),
    ),
    "cpu-ray": (
        Case("--distributed-executor-backend ray", vllm=CPU), Case("--distributed-executor-backend mp", vllm=CPU),
    ),
    "cpu-nixl": (
        Case(f"{transfer('NixlConnector')} --kv-cache-dtype fp8", vllm=CPU), Case(transfer("NixlConnector"), vllm=CPU),
    ),
}  # fmt: skip
BY_ID = {rule.id: rule for rule in RULES}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(case: Case) -> Reading:
        (tmp_path / "config.json").write_text(json.dumps(case.model))
        releases = {"vllm": case.vllm, "lmcache": case.lmcache}
        for module in ("preflight.subject", "doctor.reading"):
            monkeypatch.setattr(f"entrypoint.{module}.installed_version", releases.get)
        subject = Subject(Arguments([str(tmp_path), *shlex.split(case.words)]), {"PATH": str(tmp_path), **case.env})
        return Reading(subject, parsing.own(subject.arguments), "the test")

    return make


def test_every_rule_has_its_two_cases() -> None:
    assert list(CASES) == list(BY_ID)
    assert len(BY_ID) == len(RULES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_its_fault(name: str, read: Any) -> None:
    finding = BY_ID[name].examine(read(CASES[name][0]))
    assert finding is not None
    assert finding.found


@pytest.mark.parametrize("name", CASES)
def test_a_rule_does_not_find_what_is_not_there(name: str, read: Any) -> None:
    assert BY_ID[name].examine(read(CASES[name][1])) is None


@pytest.mark.parametrize("name", [rule.id for rule in RULES if rule.vllm or rule.lmcache])
def test_releases_without_the_fault_are_left_alone(name: str, read: Any) -> None:
    rule, case = BY_ID[name], CASES[name][0]
    others = {
        "<": {"vllm": "9", "lmcache": "9"},
        ">": {"vllm": "0.1", "lmcache": "0.1"},
    }[(rule.vllm or rule.lmcache)[0]]
    changed = Case(
        case.words, case.env, case.model, others["vllm"] if rule.vllm else case.vllm,
        others["lmcache"] if rule.lmcache else case.lmcache,
    )  # fmt: skip
    assert rule.examine(read(changed)) is None


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_says_what_why_and_what_to_change(rule: Any) -> None:
    assert rule.level in LEVELS
    assert all(text.endswith(".") for text in (rule.what, rule.why, rule.change))
    assert all("#" in reference for reference in rule.upstream)
    assert rule.patch is None or rule.patch in PATCH_IDS


@pytest.mark.parametrize(
    ("env", "level"),
    [({}, HELD), ({"SPLINT_PATCHES": "-cpu_expert_parallel"}, "refuse"), ({"SPLINT_MODE": "off"}, "refuse")],
)
def test_a_fault_counts_as_held_only_while_its_patch_is_on(env: dict[str, str], level: str, read: Any) -> None:
    finding = BY_ID["cpu-experts"].examine(read(Case("-dp 2 -ep", env, MOE, CPU)))
    assert finding is not None
    assert finding.level == level


@pytest.mark.parametrize(("policy", "held"), [("align", True), ("strict", True), ("report", False)])
def test_a_budget_that_is_only_reported_holds_nothing(policy: str, held: bool, read: Any) -> None:
    finding = BY_ID["unequal-pools"].examine(read(Case("-dp 2 -ep", {"SPLINT_KV_BUDGET": policy}, MOE)))
    assert finding is not None
    assert (finding.level == HELD) is held


def test_an_alias_is_the_option_that_it_stands_for() -> None:
    words = ["m", "-tp", "2", "-dp=4", "--no-enable-prefix-caching", "--max-model-len", "auto", "--enforce-eager"]
    assert parsing.own(Arguments(words)) == {
        "tensor_parallel_size": 2, "data_parallel_size": 4, "enable_prefix_caching": False, "max_model_len": "auto",
        "enforce_eager": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"lmcache.mp.server_urls": "tcp://a:1, GRPC+unix:///x"}, True),
        ({"lmcache.mp.server_urls": ["grpc://a:1"]}, True),
        ({"lmcache.mp.server_urls": ["tcp://grpc:1"]}, False),
    ],
)
def test_every_form_of_a_server_over_grpc_is_found(extra: dict[str, Any], named: bool, read: Any) -> None:
    assert (BY_ID["server-over-grpc"].examine(read(Case(transfer(extra=extra)))) is not None) is named


@pytest.mark.parametrize(
    ("extra", "addresses"),
    [
        ({}, [("localhost", 5555)]),
        ({"lmcache.mp.host": "tcp://h", "lmcache.mp.port": 7}, [("h", 7)]),
        ({"lmcache.mp.server_urls": "tcp://a:1, b:2"}, [("a", 1), ("b", 2)]),
        ({"lmcache.mp.server_urls": ["ipc:///x"]}, []),
    ],
)
def test_where_lmcache_servers_are_looked_for(
    extra: dict[str, Any], addresses: list[tuple[str, int]], read: Any
) -> None:
    assert server_addresses(read(Case(transfer(extra=extra)))) == addresses


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_an_lmcache_server_that_listens_is_not_called_silent(listening: int, read: Any) -> None:
    case = Case(transfer(extra={"lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": listening}))
    assert BY_ID["server-silent"].examine(read(case)) is None


def test_lmcaches_settings_are_found_in_its_file(tmp_path: Path, read: Any) -> None:
    (tmp_path / "lmcache.yaml").write_text("remote_url: lm://host:1\n")
    assert BY_ID["store"].examine(read(Case(V1, {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")})))
    assert BY_ID["store"].examine(read(Case(V1, {"LMCACHE_REMOTE_URL": "redis://host:1"})))
