"""What every check is given: the command line, the environment, and what is known of machine, model and releases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from entrypoint.checking import CheckFailedError
from entrypoint.model import Model
from entrypoint.preflight import nvidia
from patches.framework import checkpoint, kv_dtype, settings
from patches.framework.arguments import Arguments
from patches.framework.libraries import installed_version

__all__ = ["Subject"]

DEVICES = Path("/dev")
_LMCACHE = ("LMCacheConnectorV1", "LMCacheMPConnector")


class Subject:
    """A server that is about to be started.

    Attributes:
        arguments: Those of ``vllm serve``.
        environ: The environment that it will have.
        thorough: Whether to test, too, what this very server does not need.
        gpus: The GPUs that it may use.
        machine: All GPUs and their driver, or None.
        no_gpu: Why no device can be checked, or None.
        unreadable: Why the driver's description could not be read, or None.
    """

    def __init__(self, arguments: Arguments, environ: Mapping[str, str], *, thorough: bool = False) -> None:
        self.arguments = arguments
        self.environ = dict(environ)
        self.thorough = thorough
        self.gpus: tuple[nvidia.Gpu, ...] = ()
        self.machine: nvidia.Machine | None = None
        self.unreadable: CheckFailedError | None = None
        self.no_gpu = self._look()

    def _look(self) -> str | None:
        """Read the GPUs; returns why there is nothing to check."""
        if self.vllm is not None and "cpu" in self.vllm:
            return f"vLLM {self.vllm} is a CPU build"
        try:
            self.machine = nvidia.read(self.environ)
        except CheckFailedError as error:
            self.unreadable = error
            return None
        if self.machine is None:
            if any(DEVICES.glob("nvidia[0-9]*")):
                return "nvidia-smi is missing: give the container the driver's utility capability"
            return "this machine has no NVIDIA GPU"
        self.gpus = nvidia.visible(self.machine, self.environ)
        return None if self.gpus else "no GPU is visible (CUDA_VISIBLE_DEVICES)"

    @property
    def vllm(self) -> str | None:
        """The installed release of vLLM."""
        return installed_version("vllm")

    @property
    def lmcache(self) -> str | None:
        """The installed release of LMCache."""
        return installed_version("lmcache")

    @cached_property
    def model(self) -> Model:
        """The model's shape."""
        return Model(checkpoint.read(self.arguments.model, self.arguments.value("--revision"), self.environ))

    @property
    def workers(self) -> int:
        """Workers on this node: TP x PP for each of its data-parallel ranks."""
        ranks = self._size("--data-parallel-size-local", "-dpl") or self._size("--data-parallel-size", "-dp") or 1
        return self.workers_of_engine * ranks

    @property
    def workers_of_engine(self) -> int:
        """TP x PP."""
        return (self._size("--tensor-parallel-size", "-tp") or 1) * (self._size("--pipeline-parallel-size", "-pp") or 1)

    def _size(self, *names: str) -> int | None:
        text = self.arguments.value(*names) or ""
        return int(text) if text.isdecimal() and int(text) else None

    @property
    def cache_dtype(self) -> str:
        """What the operator asks for: the flag, else ``SPLINT_KV_DTYPE``, else ``auto``."""
        return self.arguments.value(kv_dtype.FLAG) or settings.get(kv_dtype.SETTING, self.environ) or kv_dtype.AUTO

    @property
    def lmcache_connector(self) -> str | None:
        """The LMCache connector that the server will have, or None."""
        named = self.arguments.transfer_config.get("kv_connector")
        if named in _LMCACHE:
            return str(named)
        # vLLM makes the multi-process connector of this flag.
        return _LMCACHE[1] if self.arguments.value("--kv-offloading-backend") == "lmcache" else None
