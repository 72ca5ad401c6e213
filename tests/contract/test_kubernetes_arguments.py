"""The manifests' arguments, as vLLM's and LMCache's own parsers read them, and the ranks that vLLM derives."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.manifests import BASES, built, container, templates, words
from support.servers import engine_environment

pytestmark = pytest.mark.full

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 512,
}  # fmt: skip

# One process for all: an import of vLLM and one of LMCache.
CODE = """
    import argparse, json, sys
    from entrypoint.doctor.parsing import _parse
    from vllm.engine.arg_utils import AsyncEngineArgs
    from lmcache.cli.commands.server import ServerCommand
    from lmcache.v1.multiprocess.http_apis.info_api import router

    asked = json.loads(sys.argv[1])
    said = {"routes": [route.path for route in router.routes], "servers": {}, "ranks": []}
    for name, words in asked["servers"].items():
        found = _parse(words)
        kept = ("error", "model_tag", "headless", "nnodes", "node_rank", "master_addr", "data_parallel_size", "port",
                "data_parallel_backend", "enable_expert_parallel", "shutdown_timeout", "kv_transfer_config")
        said["servers"][name] = {key: found[key] for key in kept if key in found}
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    said["lmcache"] = vars(parser.parse_args(asked["lmcache"]))
    for words in asked["ranks"]:
        found = argparse.Namespace(**_parse(words))
        found.model = found.model_tag
        args = AsyncEngineArgs.from_cli_args(found)
        parallel = args.create_engine_config(headless=found.headless).parallel_config
        said["ranks"].append([parallel.data_parallel_rank, parallel.data_parallel_size_local,
                              parallel.data_parallel_master_ip, parallel.node_rank_within_dp])
    print(json.dumps(said, default=str))
"""


def pods() -> dict[str, Any]:
    return {
        f"{base}/{name}": template
        for base in BASES
        for document in built(base)
        for name, template in templates(document)
    }


def of_the_group(name: str, model: str, index: int) -> list[str]:
    """A pod's words without what needs a GPU or an LMCache server."""
    given = words(pods()[name], MODEL=model, LWS_WORKER_INDEX=str(index), LWS_LEADER_ADDRESS="10.0.0.7")
    return [word for word in given if not word.startswith("--kv-")] + ["--skip-tokenizer-init", "--max-model-len=64"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model: Path = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    asked = {
        "servers": {
            name: words(template)
            for name, template in pods().items()
            if not name.endswith("/lmcache") and name != "wide-ep-ray/worker"
        },
        "lmcache": container(pods()["one-node/lmcache"])["args"],
        "ranks": [
            of_the_group("wide-ep/leader", str(model), 0),
            of_the_group("wide-ep/worker", str(model), 1),
        ],
    }
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE), json.dumps(asked)],
        env=engine_environment(SPLINT_MODE="off"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_vllm_takes_the_arguments_of_every_server(said: Any) -> None:
    assert {name: found.get("error") for name, found in said["servers"].items()} == dict.fromkeys(said["servers"])
    assert set(said["servers"]) == {"one-node/vllm-splint", "wide-ep/leader", "wide-ep/worker", "wide-ep-ray/leader"}
    for found in said["servers"].values():
        assert found["enable_expert_parallel"] is True
        assert found["shutdown_timeout"] == 60
    assert said["servers"]["wide-ep-ray/leader"]["data_parallel_backend"] == "ray"
    assert [found["headless"] for found in said["servers"].values()].count(True) == 1


def test_vllm_derives_each_nodes_ranks_from_the_groups_variables(said: Any) -> None:
    assert said["ranks"] == [[0, 8, "10.0.0.7", 0], [8, 8, "10.0.0.7", 0]]


def test_lmcache_takes_its_arguments_and_has_the_route_that_its_probes_ask(said: Any) -> None:
    assert (said["lmcache"]["port"], said["lmcache"]["http_port"]) == (5555, 8080)
    assert said["lmcache"]["isolated_ipc"] is True
    probes = container(pods()["one-node/lmcache"])
    asked = {probes[probe]["httpGet"]["path"] for probe in probes if probe.endswith("Probe")}
    assert asked <= set(said["routes"])
