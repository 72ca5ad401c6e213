"""deploy/k8s: valid by Kubernetes' own schemas, and true to what the image serves, ends and may write."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from support.gate_stage import Stage
from support.manifests import BASES, FOLDER, Document, built, container, environment, of_kind, templates, words

from patches.framework import rundir, settings
from patches.framework.arguments import Arguments
from patches.supervision import clearing, command, outcome

RELEASES = ("1.30", "1.37")
PODS = [
    pytest.param(base, name, template, id=f"{base}-{name}")
    for base in BASES
    for document in built(base)
    for name, template in templates(document)
]
each_pod = pytest.mark.parametrize(("base", "name", "template"), PODS)
SERVERS = [param for param in PODS if param.values[1] != "lmcache"]
each_server = pytest.mark.parametrize(("base", "name", "template"), SERVERS)
each_with_http = pytest.mark.parametrize("template", [pod.values[2] for pod in SERVERS if pod.values[1] != "worker"])
# With Ray the worker's pod holds Ray's own process.
OURS = [pod.values[2] for pod in SERVERS if pod.values[:2] != ("wide-ep-ray", "worker")]


def is_headless(template: Document) -> bool:
    return "--headless" in words(template)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("base", BASES)
def test_every_document_is_valid_in_the_oldest_and_newest_release(base: str, release: str) -> None:
    for document in built(base):
        if document["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(document, release, strict=True)
        for name, template in templates(document):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
            kubernetes_validate.validate(pod, release, strict=True)


def test_a_misspelt_field_is_not_valid() -> None:
    (deployment,) = of_kind("one-node", "Deployment")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, RELEASES[0], strict=True)


@pytest.mark.parametrize("base", ["wide-ep", "wide-ep-ray"])
def test_a_leader_worker_set_has_the_fields_of_its_v1_and_no_other(base: str) -> None:
    """Kubernetes has no schema of it: names and values are those of leaderworkerset.x-k8s.io/v1, release 0.7."""
    (group,) = of_kind(base, "LeaderWorkerSet")
    spec, template = group["spec"], group["spec"]["leaderWorkerTemplate"]
    assert set(spec) == {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"}
    assert set(template) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert (spec["startupPolicy"], template["restartPolicy"]) == ("LeaderCreated", "RecreateGroupOnPodRestart")
    assert set(spec["rolloutStrategy"]) == {"type", "rollingUpdateConfiguration"}


@pytest.mark.parametrize("base", BASES)
def test_kubectl_builds_what_these_tests_read(base: str) -> None:
    tool = [shutil.which("kustomize"), "build"] if shutil.which("kustomize") else [shutil.which("kubectl"), "kustomize"]
    if tool[0] is None:
        pytest.skip("neither kustomize nor kubectl is on this machine")
    command = [str(word) for word in (*tool, FOLDER / base)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def by_name(documents: Any) -> dict[tuple[str, str], Document]:
        return {(document["kind"], document["metadata"]["name"]): document for document in documents}

    assert by_name(yaml.safe_load_all(made)) == by_name(built(base))


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The gate's real routes on a server with an API key, asked without it: ``gated(phase, path) -> status``."""
    monkeypatch.setenv(rundir.ENV, str(tmp_path))
    stage = Stage(tmp_path, "the key")

    async def ask(path: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(stage.app), base_url="http://gate") as client:
            return (await client.get(path)).status_code

    def status(phase: str, path: str) -> int:
        stage.enter(phase)
        return asyncio.run(ask(path))

    return status


@each_with_http
def test_each_probe_of_a_serving_pod_asks_a_route_of_the_gate_that_says_what_the_probe_means(
    template: Document, gated: Any
) -> None:
    server, arguments = container(template), Arguments(words(template))
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert str(ports["http"]) == arguments.value("--port")
    wanted = {"startupProbe": 503, "readinessProbe": 503, "livenessProbe": 200}
    for probe, while_testing in wanted.items():
        asked = server[probe]["httpGet"]
        assert asked["port"] == "http"
        assert "scheme" not in asked
        assert (gated("smoke", asked["path"]), gated("serving", asked["path"])) == (while_testing, 200), probe


@pytest.mark.parametrize(
    ("base", "asked"),
    [("wide-ep", ["splint", "health"]),
     ("wide-ep-ray", ["sh", "-c", "exec ray health-check --address=$LWS_LEADER_ADDRESS:6379"])],
)  # fmt: skip
def test_a_worker_has_no_http_side_and_is_probed_by_a_command(base: str, asked: list[str]) -> None:
    (group,) = of_kind(base, "LeaderWorkerSet")
    worker = container(dict(templates(group))["worker"])
    probes = {probe: worker[probe] for probe in worker if probe.endswith("Probe")}
    assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert all(probe["exec"]["command"] == asked for probe in probes.values())
    assert "ports" not in worker


@each_server
def test_liveness_waits_for_the_start_and_forgives_more_than_readiness(
    base: str, name: str, template: Document
) -> None:
    del base, name
    server = container(template)
    assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] >= 3600
    patience = {probe: server[probe]["periodSeconds"] * server[probe]["failureThreshold"]
                for probe in ("readinessProbe", "livenessProbe")}  # fmt: skip
    assert patience["readinessProbe"] <= 10
    assert patience["livenessProbe"] >= 60


def stop_seconds(template: Document) -> float:
    """Seconds from the decision to end a pod to the last of its processes: preStop, drain, end, clearing away."""
    sleep = container(template)["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep[0] == "sleep"
    drain = 0.0 if is_headless(template) else float(Arguments(words(template)).value("--shutdown-timeout") or "nan")
    return float(sleep[1]) + drain + outcome.TEARDOWN_S + clearing.LONGEST_S


@pytest.mark.parametrize("template", [pod.values[2] for pod in SERVERS if pod.values[:2] != ("wide-ep-ray", "worker")])
def test_the_grace_period_outlasts_pre_stop_drain_and_end(template: Document) -> None:
    assert template["spec"]["terminationGracePeriodSeconds"] > stop_seconds(template)


@pytest.mark.parametrize("base", ["wide-ep", "wide-ep-ray"])
def test_a_worker_outlasts_the_requests_that_its_leader_still_finishes(base: str) -> None:
    (group,) = of_kind(base, "LeaderWorkerSet")
    leader, worker = (template for _, template in templates(group))
    asked = float(container(worker)["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(Arguments(words(leader)).value("--shutdown-timeout") or "nan")
    assert asked >= drain + float(container(leader)["lifecycle"]["preStop"]["exec"]["command"][1])


@pytest.mark.parametrize(
    "form", ["/usr/local/bin/vllm serve", "-m vllm serve", "-m vllm.entrypoints.openai.api_server --model"]
)
@pytest.mark.parametrize("template", OURS)
def test_a_manifest_may_name_the_server_as_it_did_for_the_stock_image(template: Document, form: str) -> None:
    """``command: ["vllm", "serve"]`` and the module are supervised, gated and drained like the image's entry point."""
    argv = ["/usr/bin/python3", *form.split(), *words(template)]
    assert command.is_serving(argv)
    assert command.is_headless(argv) == is_headless(template)
    assert command.drain_seconds(argv) == 60


@each_pod
def test_each_pod_meets_the_restricted_security_standard_with_a_read_only_root(
    base: str, name: str, template: Document
) -> None:
    del base, name
    pod, server = template["spec"], container(template)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["runAsGroup"] == 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert not {"hostNetwork", "hostIPC", "hostPID", "serviceAccountName"} & set(pod)
    assert pod["automountServiceAccountToken"] is False
    assert not any("hostPort" in port for port in server.get("ports", ()))


@each_pod
def test_no_service_variable_reaches_vllm_or_lmcache_as_a_setting(base: str, name: str, template: Document) -> None:
    """A Service called vllm sets VLLM_PORT to a URL, on which vLLM fails at start; LMCACHE_* are settings too."""
    del base, name
    assert template["spec"]["enableServiceLinks"] is False


@each_pod
def test_whatever_is_written_lies_on_a_volume(base: str, name: str, template: Document) -> None:
    del base, name
    mounted = {mount["name"]: mount["mountPath"] for mount in container(template)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert set(mounted) == set(volumes)
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert {"/tmp", "/dev/shm"} <= set(mounted.values())
    folders = {key: value for key, value in environment(template).items() if value.startswith("/")}
    assert {"HOME"} <= set(folders)
    for key, value in folders.items():
        assert any(value == place or value.startswith(place + "/") for place in mounted.values()), key


@each_server
def test_settings_of_ours_are_known_and_well_formed(base: str, name: str, template: Document) -> None:
    del base, name
    settings.check_environment(environment(template))


@each_server
def test_requests_and_limits_agree_on_memory_and_gpus(base: str, name: str, template: Document) -> None:
    del base, name
    resources = container(template)["resources"]
    for kind in ("memory", "nvidia.com/gpu"):
        assert resources["requests"][kind] == resources["limits"][kind]


def matches(selector: dict[str, str], template: Document) -> bool:
    labels = template["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in selector.items())


@pytest.mark.parametrize("base", BASES)
def test_only_engines_reach_the_lmcache_server_and_only_its_message_port(base: str) -> None:
    pods = {name: template for document in built(base) for name, template in templates(document)}
    policy = next(each for each in of_kind(base, "NetworkPolicy") if each["metadata"]["name"] == "lmcache")
    assert matches(policy["spec"]["podSelector"]["matchLabels"], pods["lmcache"])
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == []
    (rule,) = policy["spec"]["ingress"]
    (origin,) = rule["from"]
    assert list(origin) == ["podSelector"]
    admitted = {name for name, template in pods.items() if matches(origin["podSelector"]["matchLabels"], template)}
    assert admitted == set(pods) - {"lmcache"}
    (port,) = rule["ports"]
    assert {"name": "lmcache", "containerPort": port["port"]} in container(pods["lmcache"])["ports"]


@pytest.mark.parametrize("base", BASES)
def test_engines_look_for_the_lmcache_server_of_their_own_node_where_it_listens(base: str) -> None:
    service = next(each for each in of_kind(base, "Service") if each["metadata"]["name"] == "lmcache")["spec"]
    assert (service["type"], service["internalTrafficPolicy"]) == ("ClusterIP", "Local")
    pods = {name: template for document in built(base) for name, template in templates(document)}
    cache = container(pods.pop("lmcache"))
    (port,) = service["ports"]
    named = {each["name"]: each["containerPort"] for each in cache["ports"]}
    given = Arguments(cache["args"])
    assert [given.value(flag) for flag in ("--port", "--http-port", "--prometheus-port")] == [
        str(named[name]) for name in ("lmcache", "http", "metrics")
    ]
    for template in pods.values():
        transfer = json.loads(environment(template)["KV_TRANSFER"])["kv_connector_extra_config"]
        assert (transfer["lmcache.mp.host"], transfer["lmcache.mp.port"]) == ("lmcache", port["port"])
        assert transfer["lmcache.mp.isolated_ipc"] == given.has("--isolated-ipc")


@pytest.mark.parametrize("base", BASES)
def test_services_and_disruption_budgets_select_the_pods_that_they_mean(base: str) -> None:
    pods = {name: template for document in built(base) for name, template in templates(document)}
    service = next(each for each in of_kind(base, "Service") if each["metadata"]["name"] == "vllm-splint")["spec"]
    assert [name for name, template in pods.items() if matches(service["selector"], template)] == [
        name for name in pods if name in ("vllm-splint", "leader")
    ]
    (budget,) = of_kind(base, "PodDisruptionBudget")
    chosen = {name for name, template in pods.items() if matches(budget["spec"]["selector"]["matchLabels"], template)}
    assert chosen == set(pods) - {"lmcache"}
    assert budget["spec"]["maxUnavailable"] == 1


def test_the_ranks_of_a_group_are_reached_by_the_group_alone_and_clients_by_http() -> None:
    policy = next(each for each in of_kind("wide-ep", "NetworkPolicy") if each["metadata"]["name"] == "vllm-splint")
    group, clients = policy["spec"]["ingress"]
    assert set(group) == {"from"}
    assert clients == {"ports": [{"port": 8000, "protocol": "TCP"}]}


def test_leader_and_worker_start_the_same_engine() -> None:
    """What differs between them would be refused by the KV budget's agreement, after the model is loaded."""
    (group,) = of_kind("wide-ep", "LeaderWorkerSet")
    leader, worker = (template for _, template in templates(group))
    apart = set(words(leader)) ^ set(words(worker))
    assert apart == {"--headless", "--host=0.0.0.0", "--port=8000"}
    assert environment(leader) == environment(worker)
    for part in ("resources", "volumeMounts", "image", "securityContext"):
        assert container(leader)[part] == container(worker)[part]


def test_the_data_parallel_ranks_fill_the_gpus_of_their_nodes() -> None:
    for base in BASES:
        nodes = next((each["spec"]["leaderWorkerTemplate"]["size"] for each in of_kind(base, "LeaderWorkerSet")), 1)
        server = next(
            template for document in built(base) for name, template in templates(document) if name != "lmcache"
        )
        gpus = int(container(server)["resources"]["limits"]["nvidia.com/gpu"])
        assert Arguments(words(server)).value("--data-parallel-size") == str(nodes * gpus), base
