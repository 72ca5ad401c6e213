"""A configuration as the rules look at it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patches import catalogue
from patches.framework import settings
from patches.framework.kv_dtype import AUTO, MODEL, is_quantised
from patches.framework.libraries import in_range, installed_version
from patches.framework.selection import selected

if TYPE_CHECKING:
    from entrypoint.model import Model
    from entrypoint.preflight.subject import Subject

__all__ = ["Reading"]

IN_PROCESS = "LMCacheConnectorV1"
MULTI_PROCESS = "LMCacheMPConnector"
_OFF = ("", "0", "false", "no", "off")


class Reading:
    """Arguments, environment, model and releases together.

    Attributes:
        subject: The server as the preflight knows it.
        values: vLLM's arguments by its own names.
        read_by: Whose parser read them, for people.
    """

    def __init__(self, subject: Subject, values: Mapping[str, Any], read_by: str) -> None:
        self.subject = subject
        self.values = values
        self.read_by = read_by

    def value(self, name: str) -> Any:
        """An argument's value, or None."""
        return self.values.get(name)

    def number(self, name: str, default: int = 0) -> int:
        """An argument that is a whole number."""
        value = self.values.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def on(self, name: str) -> bool:
        """Whether a flag is given."""
        return self.values.get(name) is True

    def variable(self, name: str) -> str:
        """An environment variable's text."""
        return self.subject.environ.get(name, "")

    def variable_on(self, name: str) -> bool:
        """Whether an environment variable turns something on."""
        return self.variable(name).strip().lower() not in _OFF

    @property
    def model(self) -> Model:
        """The model's shape."""
        return self.subject.model

    @property
    def on_cpu(self) -> bool:
        """Whether the installed vLLM is a CPU build."""
        return "cpu" in (self.subject.vllm or "")

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.number("data_parallel_size", 1)

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.number("tensor_parallel_size", 1)

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.number("pipeline_parallel_size", 1)

    @property
    def moe_ranks(self) -> int:
        """The ranks that a mixture-of-experts layer is spread over: DP x PCP x TP."""
        return self.dp * self.number("prefill_context_parallel_size", 1) * self.tp

    @property
    def ep(self) -> bool:
        """Whether experts are spread whole."""
        return self.on("enable_expert_parallel")

    @property
    def moe(self) -> bool:
        """Whether the model has experts, as far as it is known; ``--enable-expert-parallel`` says so, too."""
        return bool(self.model.experts) or (self.ep and not self.model.known)

    @property
    def connector(self) -> str | None:
        """The KV connector."""
        named = self.subject.arguments.transfer_config.get("kv_connector")
        return str(named) if named else self.lmcache

    @property
    def lmcache(self) -> str | None:
        """The LMCache connector."""
        return self.subject.lmcache_connector

    @property
    def in_process(self) -> bool:
        """Whether LMCache runs inside the engine."""
        return self.lmcache == IN_PROCESS

    @property
    def transfer(self) -> dict[str, Any]:
        """``--kv-transfer-config`` as the operator wrote it."""
        return self.subject.arguments.transfer_config

    @property
    def kv_dtype(self) -> str:
        """What the operator asks for: a name, ``auto`` or ``model``."""
        return self.subject.cache_dtype

    @property
    def quantised_kv(self) -> bool:
        """Whether the KV cache will be quantised, by the operator's or the checkpoint's will."""
        if self.kv_dtype == AUTO:
            return self.model.declared_kv_quantisation is not None
        return self.kv_dtype != MODEL and is_quantised(self.kv_dtype)

    @cached_property
    def lmcache_file(self) -> dict[str, Any]:
        """The file that ``LMCACHE_CONFIG_FILE`` names; empty where nobody can read it."""
        import yaml

        try:
            text = Path(self.variable("LMCACHE_CONFIG_FILE") or os.devnull).read_text(encoding="utf-8")
            content = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return content if isinstance(content, dict) else {}

    def lmcache_setting(self, name: str) -> str:
        """A setting of the in-process LMCache: from the connector's own settings, the environment, or its file."""
        extra = self.subject.arguments.extra_config.get(f"lmcache.{name}")
        found = extra if extra is not None else self.variable(f"LMCACHE_{name.upper()}") or self.lmcache_file.get(name)
        return "" if found is None else str(found)

    @cached_property
    def patches(self) -> frozenset[str]:
        """The patches that are on for the installed releases."""
        if settings.get("SPLINT_MODE", self.subject.environ) == "off":
            return frozenset()
        chosen = set(selected(settings.get("SPLINT_PATCHES", self.subject.environ)))
        if settings.get("SPLINT_KV_BUDGET", self.subject.environ) == "report":
            chosen.discard("kv_budget")
        return frozenset(
            patch.id
            for patch in catalogue()
            if patch.id in chosen and _covers(self.subject.vllm if patch.library == "vllm" else None, patch)
        )


def _covers(version: str | None, patch: Any) -> bool:
    found = version or installed_version(patch.library)
    return found is not None and in_range(found, patch.releases) is not False
