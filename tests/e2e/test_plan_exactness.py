"""Blocks that ``splint plan`` names are the blocks of real engines, exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.servers import Server

from entrypoint.local.model import make_tiny_model

KV_BYTES = 1 << 30
"""As VLLM_CPU_KVCACHE_SPACE=1 gives it to every engine of these tests."""


def planned(model: str, *flags: str, kv_bytes: int = KV_BYTES) -> tuple[int, int]:
    """Blocks of one DP rank, and of all of them."""
    ended = subprocess.run(
        [sys.executable, "-m", "entrypoint.cli", "plan", model, "--device-memory", "16GiB", "--max-model-len", "2048",
         "--dtype", "bfloat16", "--kv-cache-memory-bytes", str(kv_bytes), "--json", *flags],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    made = json.loads(ended.stdout)
    assert made["checked_with_vllm"] is not None
    assert made["low"] == made["high"]
    return made["high"]["blocks_per_dp_rank"], made["high"]["blocks"]


def served(server: Server) -> list[int]:
    """Blocks of all DP ranks together, as vLLM's front end tells it, once an engine."""
    answer = server.get("/metrics")
    assert answer is not None
    lines = [line for line in answer.text.splitlines() if line.startswith("vllm:cache_config_info{")]
    return [int(found[1]) for line in lines if (found := re.search(r'num_gpu_blocks="(\d+)"', line))]


def test_the_main_jobs_blocks_are_the_planned_ones(stack: Server, model: str) -> None:
    flags = ("--data-parallel-size", "2", "--enable-expert-parallel", "--kv-cache-dtype", "fp8_e5m2")
    each, together = planned(model, *flags, "--block-size", "128")
    answer = stack.get("/metrics")
    assert answer is not None
    ranks = re.findall(r'splint_kv_blocks\{[^}]*dp_rank="(\d)"[^}]*\} ([0-9.e+]+)', answer.text)
    print(f"planned {each} blocks a rank, {together} together; served {ranks}")
    assert {rank: float(blocks) for rank, blocks in ranks} == {"0": each, "1": each}


SHAPES = {
    "one engine": ("qwen3_moe", ()),
    "blocks of 32": ("qwen3_moe", ("--block-size", "32")),
    "fp8": ("mixtral", ("--kv-cache-dtype", "fp8_e5m2", "--block-size", "64")),
    "tensor parallel": ("mixtral", ("--tensor-parallel-size", "2")),
    "pipeline": ("qwen3_moe", ("--pipeline-parallel-size", "2", "--block-size", "96")),
    "two ranks": ("mixtral", ("--data-parallel-size", "2", "--enable-expert-parallel")),
    "two ranks without EP": ("qwen3_moe", ("--data-parallel-size", "2", "--kv-cache-dtype", "fp8_e5m2")),
    "override": ("qwen3_moe", ("--num-gpu-blocks-override", "77")),
}


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_other_shapes_are_the_planned_ones(serve: Callable[..., Server], tmp_path: Path, shape: str) -> None:
    architecture, flags = SHAPES[shape]
    path = str(make_tiny_model(architecture, tmp_path))
    block = () if "--block-size" in flags else ("--block-size", "128")
    each, together = planned(path, *flags, *block)
    server = serve(*flags, model_path=path, env={"SPLINT_SMOKE": "off"})
    found = served(server)
    print(f"{shape}: planned {each} a rank, {together} together; served {found}")
    assert found
    assert set(found) == {together}
