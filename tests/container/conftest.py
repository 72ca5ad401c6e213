"""The images under test: the real Dockerfile, built by a real engine on stand-ins for what no registry gives here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.containers import ROOT, Compose, Container, Start, container, docker
from support.images import Images, build
from support.servers import free_port

from entrypoint.local.model import make_tiny_model

DRAIN_S = 90
"""What a busy machine takes for a request of some seconds, and more."""


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with what the package index lacks (the CPU build of torch), or an empty one."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    )
    folder = asked.stdout.strip()
    return folder if Path(folder).is_dir() else str(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def images(wheels: str) -> Images:
    """Both images, built by the Dockerfile as it is; layers of an earlier run are used again.

    ``IMAGES=as-they-are`` in the environment tests those that an earlier run left.
    """
    if not os.environ.get("DOCKER_HOST", "").startswith("unix://"):
        pytest.fail("no private Docker engine: run `make container`, or tools/containers/engine.sh COMMAND")
    built = Images()
    if os.environ.get("IMAGES") == "as-they-are":
        return built
    subprocess.run(["bash", "tools/containers/standins.sh"], cwd=ROOT, check=True, timeout=900)
    for target in ("cpu", "gpu"):
        start = time.monotonic()
        build(target, getattr(built, target), wheels)
        print(f"image {target}: built in {time.monotonic() - start:.0f} s")
    return built


@pytest.fixture(scope="module")
def main_job(images: Images) -> Iterator[Compose]:
    """``docker compose --profile cpu up``: LMCache and two data-parallel ranks, healthy."""
    assert docker("image", "inspect", images.cpu)
    port = free_port()
    names = {"PORT": str(port), "COMPOSE_PROJECT_NAME": "splint-cpu", "DRAIN_SECONDS": str(DRAIN_S)}
    compose = Compose(("cpu",), names)
    start = time.monotonic()
    with compose.up():
        print(f"compose --profile cpu up --wait: {time.monotonic() - start:.1f} s")
        yield compose


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tiny Qwen3-MoE on this machine; the image for GPUs has none."""
    return str(make_tiny_model(folder=tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="session")
def network() -> Iterator[str]:
    """A network of its own for containers that are run without compose."""
    name = f"splint-test-{os.getpid()}"
    docker("network", "create", name)
    yield name
    docker("network", "rm", name, check=False)


@pytest.fixture
def start(images: Images, model: str, network: str) -> Iterator[Start]:
    """``docker run`` of the GPU image, as of the stock image: ``start(*words, options=..., environ=...)``."""
    with ExitStack() as stack:

        def start(*words: str, options: tuple[str, ...] = (), **more: Any) -> Container:
            mounts = ("--network", network, "--volume", f"{model}:/model:ro")
            return stack.enter_context(container(images.gpu, *words, options=(*mounts, *options), **more))

        yield start
