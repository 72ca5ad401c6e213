"""``SPLINT_KV_DTYPE``: pins the KV cache's dtype in one place, for every form of start. Standard library only.

The first aid where a KV dtype is suspected: it becomes ``--kv-cache-dtype``, and each engine core proves that it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patches.framework import checkpoint, settings
from patches.framework.errors import RefusedError, SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from patches.framework.arguments import Arguments

__all__ = ["FLAG", "MODEL", "SETTING", "agrees", "check_engine", "is_quantised", "said", "words"]

SETTING = "SPLINT_KV_DTYPE"
FLAG = "--kv-cache-dtype"
AUTO = "auto"
MODEL = "model"

_UNQUANTISED = {
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
}
# What vLLM makes of a name by itself, for the platform or the model's attention.
_REFINED = {
    "fp8": ("fp8_e4m3", "fp8_inc", "fp8_ds_mla"),
    "fp8_e4m3": ("fp8", "fp8_inc", "fp8_ds_mla"),
    "bfloat16": (AUTO,),
    "float16": (AUTO,),
}


def is_quantised(name: str) -> bool:
    """Whether a KV dtype stores something else than the numbers that the model computes with."""
    return name != AUTO and name not in _UNQUANTISED


def agrees(pinned: str, found: str, *, declared: bool) -> bool:
    """Whether the engine's (or the command line's) dtype is what was asked for.

    Args:
        pinned: The setting's value.
        found: vLLM's ``cache_dtype`` string.
        declared: Whether the checkpoint declares its KV cache to be quantised.
    """
    if pinned == MODEL:
        return not is_quantised(found) and not (found == AUTO and declared)
    return pinned in (AUTO, found) or found in _REFINED.get(pinned, ())


def words(arguments: Arguments, environ: Mapping[str, str]) -> list[str]:
    """What the command line lacks to obey the setting; nothing where it is not set.

    Raises:
        SettingError: the command line (or its ``--config`` file) names another dtype.
        RefusedError: ``model``, and neither ``--dtype`` nor the checkpoint says which dtype that is.
    """
    pinned = settings.get(SETTING, environ)
    if not pinned:
        return []
    config = _config(arguments, environ)
    declared = checkpoint.declared_kv_quantisation(config)
    given = arguments.value(FLAG)
    if given is None:
        return [FLAG, _own(arguments, config, declared) if pinned == MODEL else pinned]
    if given != pinned and (pinned == AUTO or not agrees(pinned, given, declared=bool(declared))):
        raise SettingError(
            f"{SETTING}={pinned} and {FLAG} {given}",
            "one of them, or the same in both",
            "Remove or correct one of them.",
        )
    return []


def _config(arguments: Arguments, environ: Mapping[str, str]) -> dict[str, Any]:
    return checkpoint.read(arguments.model, arguments.value("--revision"), environ)


def _own(arguments: Arguments, config: Mapping[str, Any], declared: str | None) -> str:
    """The model's own dtype: vLLM's ``auto``, unless a declared quantisation would make that something else."""
    if declared is None:
        return AUTO
    given = arguments.value("--dtype")
    name = _UNQUANTISED.get(given if given and given != AUTO else checkpoint.dtype(config) or "")
    if name not in ("float16", "bfloat16"):
        raise RefusedError(
            f"{SETTING}={MODEL} for a checkpoint that declares {declared}, and no 16-bit dtype in it or in --dtype",
            "to know the model's own dtype",
            f"Name it: {SETTING}=bfloat16 and --dtype bfloat16.",
        )
    return name


def check_engine(vllm_config: Any, environ: Mapping[str, str]) -> None:
    """Refuse an engine whose KV dtype is not the pinned one, however it was started.

    Args:
        vllm_config: vLLM's resolved configuration.
        environ: Holds the setting.

    Raises:
        SettingError: it is another one.
    """
    pinned = settings.get(SETTING, environ)
    found = vllm_config.cache_config.cache_dtype
    declared = _declared(vllm_config)
    if pinned and not agrees(pinned, found, declared=declared):
        why = ", as the checkpoint declares" if declared else ""
        remedy = "bfloat16 (or the --dtype of the model)" if pinned == MODEL else pinned
        raise SettingError(
            f"{SETTING}={pinned}, but the engine's KV cache is {found}{why}",
            "the pinned dtype",
            f"Give {FLAG} {remedy}, or unset {SETTING}.",
        )


def _declared(vllm_config: Any) -> bool:
    quantisation = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
    if not isinstance(quantisation, dict):
        return False
    return checkpoint.declared_kv_quantisation({"quantization_config": quantisation}) is not None


def said(vllm_config: Any) -> str:
    """The engine's KV dtype for people: ``fp8_e5m2``, ``auto (bfloat16)``."""
    found = str(vllm_config.cache_config.cache_dtype)
    model = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return f"{found} ({model})" if found == AUTO else found
