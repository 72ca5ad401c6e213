"""What the images are made of, and what their build refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.containers import Compose, docker
from support.images import BASE, Images, build

FOLDER = Path(__file__).parent
SIZES = """
import json
from importlib.metadata import distribution
files = distribution("lmcache").files or []
print(json.dumps(sum(path.stat().st_size for file in files if (path := file.locate()).is_file())))
"""


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_structure(images: Images, image: str) -> None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [shutil.which("container-structure-test", path=beside) or "container-structure-test"]
    command += ["test", "--config", "structure.yaml"]
    done = subprocess.run(
        [*command, "--image", getattr(images, image)],
        capture_output=True,
        text=True,
        cwd=FOLDER,
        check=False,
        timeout=300,
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_it_adds_at_most_100_mb_to_the_base_beside_lmcache(images: Images) -> None:
    sizes = {name: int(docker("inspect", "--format", "{{.Size}}", name)) for name in (images.gpu, images.base)}
    lmcache = json.loads(docker("run", "--rm", "-i", "--entrypoint", "python3", images.gpu, "-", stdin=SIZES))
    added = sizes[images.gpu] - sizes[images.base]
    print(f"over the base: {added / 1e6:.1f} MB, {lmcache / 1e6:.1f} MB of them LMCache")
    assert added - lmcache <= 100e6


def test_torch_and_vllm_are_the_bases(images: Images) -> None:
    ask = "from importlib.metadata import version; print(version('torch'), version('vllm'))"
    said = {docker("run", "--rm", "--entrypoint", "python3", name, "-c", ask) for name in (images.gpu, images.base)}
    assert len(said) == 1


def test_compose_takes_every_profile() -> None:
    shown = docker("compose", "--profile", "*", "config", "--format", "json")
    services: dict[str, Any] = json.loads(shown)["services"]
    assert {"vllm", "lmcache", "vllm-cpu", "lmcache-cpu", "redis", "prometheus", "grafana", "head", "node"} <= set(
        services
    )
    with_override = json.loads(Compose(("*",), {})("config", "--format", "json"))["services"]
    assert {name for name, service in with_override.items() if "mem_limit" not in service} == set()


def test_plain_compose_up_takes_the_gpus() -> None:
    shown = json.loads(docker("compose", "config", "--format", "json"))["services"]
    assert set(shown) == {"vllm", "lmcache"}
    for service in shown.values():
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


@pytest.mark.full
def test_a_base_without_vllm_ends_the_build(images: Images, wheels: str) -> None:
    assert images.gpu
    with pytest.raises(RuntimeError, match="the base image is no vLLM image"):
        build("gpu", "splint-test:refused", wheels, "--build-arg", "BASE_IMAGE=python:3.11-slim-bookworm")


CHANGED_BASE = f"""
FROM {BASE}
WORKDIR /usr/local/lib/python3.11/dist-packages/vllm/entrypoints/launchers
RUN sed -i 's/Available routes are/Routes are/' launcher.py
"""


@pytest.mark.full
def test_a_base_with_another_source_ends_the_build_and_names_the_function(images: Images, wheels: str) -> None:
    assert images.gpu
    docker("build", "--network=host", "-t", "splint-test:changed", "-", stdin=CHANGED_BASE)
    with pytest.raises(RuntimeError, match=r"(?s)do not fit this base.*serve_http"):
        build("gpu", "splint-test:refused", wheels, "--build-arg", "BASE_IMAGE=splint-test:changed")


@pytest.mark.full
def test_the_gpu_services_start_as_they_are_wired(images: Images) -> None:
    """The reservation is met by a stub, so LMCache comes up and vLLM's preflight has the word; there is no GPU."""
    assert images.gpu
    compose = Compose(
        ("gpu",), {"COMPOSE_PROJECT_NAME": "splint-gpu", "RESTART": "no", "CACHE_GIB": "1", "MODEL": "/models/none"}
    )
    with compose.up(wait=False):
        assert compose.service("vllm").wait_end(120) == 78
        assert "/models/none" in compose.service("vllm").logs()
