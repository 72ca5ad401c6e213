"""The images under test and their build."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from support.containers import ROOT

__all__ = ["BASE", "Images", "build"]

BASE = "vllm/vllm-openai:v0.32.0"


@dataclass(frozen=True)
class Images:
    """Names of what was built, and of the base."""

    gpu: str = "vllm-splint:latest"
    cpu: str = "vllm-splint:cpu"
    base: str = BASE


def build(target: str, name: str, wheels: str, *options: str) -> str:
    """Build a target of the Dockerfile; returns what the builder said. Raises RuntimeError where it fails."""
    command = ["build", "--progress=plain", "--network=host", "--build-context", f"wheels={wheels}", *options]
    done = subprocess.run(
        ["docker", *command, "--target", target, "-t", name, "."],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"build of {target}: code {done.returncode}\n{done.stderr[-6000:]}")
    return done.stderr
