"""What to start: the commands and the environment of the LMCache server and of the engine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from entrypoint.local.ports import free_ports
from patches.framework import rundir
from patches.framework.arguments import Arguments

__all__ = ["CHUNK_TOKENS", "CachePorts", "Plan", "cache_command", "engine_command", "engine_environment", "option"]

CHUNK_TOKENS = 128
"""LMCache's chunk size: a multiple of the KV block size, which is 128 tokens on the CPU backend and 16 elsewhere."""

TINY_NAME = "tiny-moe"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """What the user asked for.

    Attributes:
        model: A folder, a name on the model hub, or None for the tiny model.
        architecture: Of the tiny model.
        port: Where the server listens.
        arguments: More arguments for ``vllm serve``; they win over ours.
        launcher: The command that takes ``serve MODEL ...``.
        cache_launcher: The command that takes ``server ...``.
    """

    model: str | None
    architecture: str
    port: int
    arguments: tuple[str, ...]
    launcher: tuple[str, ...] = (sys.executable, "-m", "entrypoint.cli")
    cache_launcher: tuple[str, ...] = (str(Path(sys.executable).with_name("lmcache")),)

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        default = TINY_NAME if self.model is None else self.model
        return option(self.arguments, "--served-model-name") or default

    @property
    def drain_s(self) -> float:
        """Seconds that vLLM may take to finish requests after a stop."""
        return float(option(self.arguments, "--shutdown-timeout") or 0)

    @property
    def url(self) -> str:
        """Where the server answers, without ``/v1``."""
        scheme = "https" if option(self.arguments, "--ssl-certfile") else "http"
        host = option(self.arguments, "--host") or LOOPBACK
        if host in ("0.0.0.0", "::"):  # noqa: S104 - every address, loopback among them
            host = LOOPBACK
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def takes_a_key(self) -> bool:
        """Whether requests need an API key."""
        return option(self.arguments, "--api-key") is not None or bool(os.environ.get("VLLM_API_KEY"))


@dataclass(frozen=True)
class CachePorts:
    """The LMCache server's ports on the loopback address."""

    messages: int
    http: int
    metrics: int

    @classmethod
    def choose(cls) -> CachePorts:
        """Three ports that are free now."""
        return cls(*free_ports(3))


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value of ``--name value`` or ``--name=value``, as the server's own parser would take it."""
    value = None
    for position, argument in enumerate(arguments):
        key, separator, attached = argument.partition("=")
        if key.replace("_", "-") == name:
            value = attached if separator else next(iter(arguments[position + 1 :]), None)
    return value


def cache_command(plan: Plan, ports: CachePorts) -> list[str]:
    """The LMCache server's command line.

    With the default transfer mode the CPU backend's engine hangs for minutes when it registers its KV cache.
    """
    listen = f"--host 127.0.0.1 --port {ports.messages} --http-host 127.0.0.1 --http-port {ports.http}"
    cache = f"--chunk-size {CHUNK_TOKENS} --l1-size-gb 1 --eviction-policy LRU --supported-transfer-mode auto"
    return [*plan.cache_launcher, "server", *shlex.split(f"{listen} --prometheus-port {ports.metrics} {cache}")]


def engine_command(plan: Plan, model: str, ports: CachePorts) -> list[str]:
    """The engine's command line; ``plan.arguments`` come last and win."""
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": ports.messages},
    }
    command = [*plan.launcher, "serve", model, "--host", LOOPBACK, "--port", str(plan.port)]
    command += ["--data-parallel-size", str(_data_parallel_size()), "--enable-expert-parallel"]
    command += ["--kv-cache-dtype", "fp8_e5m2", "--kv-transfer-config", json.dumps(transfer)]
    command += ["--enforce-eager", "--max-num-seqs", "8"]
    if plan.model is None:
        command += ["--served-model-name", TINY_NAME, "--dtype", "bfloat16", "--max-model-len", "2048"]
    return [*command, *plan.arguments]


def engine_environment(plan: Plan, run_dir: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of engine and LMCache server, which share a run directory: ``environ`` wins over ours."""
    ours = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", rundir.ENV: str(run_dir)}
    if _on_cpu():
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        ours["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // _data_parallel_size()))
        if not Arguments(plan.arguments).has("--no-enforce-eager"):
            # Even then vLLM compiles what ranks log-probabilities, for seconds on each rank and with a C++ compiler.
            ours["TORCH_COMPILE_DISABLE"] = "1"
    if plan.model is None or Path(plan.model).exists():
        ours["HF_HUB_OFFLINE"] = "1"
    return {**ours, **environ}


def _on_cpu() -> bool:
    try:
        return version("vllm").endswith("+cpu")
    except PackageNotFoundError:
        return True


def _data_parallel_size() -> int:
    """2 ranks, or 1 where there is a single GPU."""
    if _on_cpu():
        return 2
    listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    return min(2, max(1, listed.stdout.count("GPU ")))
