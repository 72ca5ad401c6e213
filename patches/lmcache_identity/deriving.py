"""The profile of a real engine, read from vLLM's own configuration and from what its workers say of their layers.

Read before the workers are started, when engine core and worker have equal copies. Later they do not: the engine core's
learns KV layout, block count and capacity, a worker's learns these in part and hash sizes of its own, and a model with
a KV scheme or a sparse attention of its own turns ``auto`` into ``fp8`` or ``fp8_ds_mla`` in the workers alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from fractions import Fraction
from typing import Any

from patches.framework.errors import ProfileError
from patches.framework.judging import release_of
from patches.lmcache_identity.layouts import layout_of
from patches.lmcache_identity.media import processing_of
from patches.lmcache_identity.profile import OPAQUE, RUN_TIME_SCALES, KVCacheProfile, KVGroup
from patches.lmcache_identity.weights import weights_identity

__all__ = ["canonical", "derive", "fp8_name", "groups_of", "normalised_cache_dtype", "weights_of"]

_NOT_THE_MODELS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Fields of an HF configuration that say where it came from, not what the model is."""

_NOT_THE_BYTES = frozenset(
    {"block_size", "block_stride_alignment", "page_size_padded", "extra_retained_tokens", "num_speculative_blocks"}
)
"""Fields of a layer's KV spec that move blocks about without giving their bytes another meaning."""

_MODE = "lmcache.mp.mp_transfer_mode"
_MODE_OF_ALL = "LMCACHE_MP_TRANSFER_MODE"
"""LMCache asks the environment where the connector is not told."""

_ADAPTER_SETTINGS = ("target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
"""Fields of vLLM's ``LoRAConfig`` that decide what of an adapter is used, and how it is read."""

_OWN_FIELDS = frozenset({"num_kv_heads", "head_size", "dtype", "kv_quant_mode", "tokens_per_state"})


def derive(config: Any) -> KVCacheProfile:
    """The profile as far as the configuration tells it: everything but the layer groups.

    Args:
        config: vLLM's ``VllmConfig``, before workers change it.

    Raises:
        ProfileError: a part can't be told from others of its kind.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    return KVCacheProfile(
        cache_dtype=normalised_cache_dtype(cache.cache_dtype, _name(model.dtype), fnuz=_fnuz()),
        dtype=_name(model.dtype),
        layout=layout_of(release_of("vllm") or "unknown", on_cpu=_on_cpu()),
        weights=weights_of(config),
        configuration=_configuration(model),
        weight_quantisation=_quantisation(model),
        scales=RUN_TIME_SCALES if getattr(cache, "calculate_kv_scales", False) else "checkpoint",
        draft=_draft(config.speculative_config, config.load_config),
        transfer=_transfer(config.kv_transfer_config),
        adapters=_adapters(config.lora_config, _name(model.dtype)),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size,
    )


def normalised_cache_dtype(cache_dtype: str, model_dtype: str, *, fnuz: bool) -> str:
    """The one name of a ``--kv-cache-dtype``.

    Args:
        cache_dtype: As the operator gave it, or ``auto``.
        model_dtype: Torch's name of the dtype that the model computes in: what ``auto`` means.
        fnuz: Whether this platform's e4m3 is AMD's, in which the same bytes are other numbers.
    """
    if cache_dtype == "auto":
        return model_dtype
    name = "fp8_e4m3" if cache_dtype == "fp8" else cache_dtype
    return f"{name}fnuz" if fnuz and name in ("fp8_e4m3", "fp8_per_token_head") else name


def fp8_name() -> str:
    """What ``fp8`` means on this platform."""
    return normalised_cache_dtype("fp8", "", fnuz=_fnuz())


def _fnuz() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_fp8_fnuz())


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def weights_of(config: Any) -> str:
    """Identity of the weights where ``config``, vLLM's ``VllmConfig``, says that they lie, as they lie there now.

    Raises:
        ProfileError: they have none.
    """
    return _weights(config.model_config, config.load_config)


def _weights(model: Any, load: Any) -> str:
    if load is not None and load.load_format == "dummy":
        return "dummy"
    source = getattr(model, "model_weights", "") or model.model
    config_is_the_models = not model.hf_config_path or model.hf_config_path == model.model
    commit = getattr(model.hf_config, "_commit_hash", None) if config_is_the_models else None
    identity = weights_identity(source, model.revision, commit)
    # A loader may take the weights from elsewhere (a tensorizer_uri); the model's own files then say nothing of them.
    elsewhere = getattr(load, "model_loader_extra_config", None)
    return f"{identity} loaded by {_digest(elsewhere)[:12]}" if elsewhere else identity


def _configuration(model: Any) -> str:
    """Digest of the HF configuration with overrides, and of what vLLM takes from elsewhere for the same purpose."""
    content = {"hf": model.hf_config, "long_rope": _long_rope(model), "sliding": model.disable_sliding_window}
    media = processing_of(model)
    return _digest(content if media is None else {**content, "media": media})


def _long_rope(model: Any) -> bool | None:
    """Whether LongRoPE uses its long factors, which vLLM decides by ``--max-model-len``; None without LongRoPE."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return None
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return None if original is None else bool(model.max_model_len > original)


def _quantisation(model: Any) -> str:
    if not model.quantization:
        return ""
    settings = getattr(model, "quantization_config", None)
    return str(model.quantization) if settings is None else f"{model.quantization}:{_digest(settings)[:12]}"


def _draft(speculative: Any, load: Any) -> str:
    """Identity of the speculative model: its layers lie in the same cache and are stored with the others."""
    if speculative is None:
        return ""
    draft = speculative.draft_model_config
    parts = [speculative.method, getattr(speculative, "kv_cache_dtype", None)]
    if draft is not None:
        parts += [_weights(draft, load), _configuration(draft), _quantisation(draft)]
    return _digest(parts)


def _adapters(lora: Any, dtype: str) -> str:
    """What this engine makes of LoRA adapters; nothing where it uses the whole of them in the model's own dtype."""
    if lora is None:
        return ""
    settings = {name: getattr(lora, name, None) for name in _ADAPTER_SETTINGS}
    kept = {name: value for name, value in settings.items() if value is not None and value is not False}
    if "target_modules" in kept:
        kept["target_modules"] = sorted(kept["target_modules"])
    if (own := _name(lora.lora_dtype)) not in ("auto", dtype):
        kept["lora_dtype"] = own
    return _digest(kept)[:12] if kept else ""


def _transfer(transfer: Any) -> str:
    """The transfer mode that the operator asked for, by LMCache's name; nothing where it is the device's own."""
    if transfer is None:
        return ""
    named = set(_modes(transfer.kv_connector, transfer.kv_connector_extra_config or {})) - {"auto"}
    return ",".join(sorted(named - {_own_mode()})) if named else ""


def _modes(connector: str | None, extra: Mapping[str, Any]) -> Iterator[str]:
    """What LMCache's multi-process connector, or each of it inside a connector of several, is told."""
    if connector == "LMCacheMPConnector":
        yield str(extra.get(_MODE) or os.environ.get(_MODE_OF_ALL, "auto")).lower()
    for inner in extra.get("connectors", ()):
        yield from _modes(inner.get("kv_connector"), inner.get("kv_connector_extra_config") or {})


def _own_mode() -> str:
    """LMCache's answer for the device.

    On the CPU it isn't asked: it imports numba, and with that in ``sys.modules`` vLLM's CPU worker dies of its search
    for Triton kernels.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "engine_driven"
    from lmcache.v1.platform import get_device_spec

    spec = get_device_spec(current_platform.device_type)
    return "engine_driven" if spec is None else str(spec.default_mp_transfer_mode().value)


def _digest(value: Any) -> str:
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(value: Any, where: str = "configuration") -> Any:
    """A configuration value as JSON that is the same in every process.

    Raises:
        ProfileError: an object that shows neither its fields nor a name; ``where`` says which one.
    """
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, (float, Fraction)):
        return repr(value)
    if callable(getattr(value, "to_dict", None)):
        value = value.to_dict()
    if isinstance(value, Mapping):
        kept = {str(key): found for key, found in value.items() if key not in _NOT_THE_MODELS}
        return {key: canonical(found, f"{where}.{key}") for key, found in kept.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(found, f"{where}[{index}]") for index, found in enumerate(value)]
    return _object(value, where)


def _object(value: Any, where: str) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted((canonical(found, where) for found in value), key=repr)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if type(value).__module__ == "torch":
        return str(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "__dict__"):
        return canonical(vars(value), where)
    return _unknown(value, where)


def _unknown(value: Any, where: str) -> Any:
    raise ProfileError(
        f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, whose content can't be read",
        "plain values, mappings, lists, dataclasses or configurations with to_dict",
        "Report it with the model's name, or leave out kv_profile and lmcache_identity with SPLINT_PATCHES.",
    )


def groups_of(configs: Iterable[Any]) -> Iterator[KVGroup]:
    """Every layer group of every pipeline stage.

    Args:
        configs: vLLM's ``KVCacheConfig`` of each worker of the engine, in order of rank. The ranks of one
            tensor-parallel group hold the same layers and are one stage.
    """
    stage, before = -1, None
    for config in configs:
        layers = [tuple(group.layer_names) for group in config.kv_cache_groups]
        if layers == before:
            continue
        stage, before = stage + 1, layers
        for index, group in enumerate(config.kv_cache_groups):
            yield from _formats(stage, index, group)


def _formats(stage: int, index: int, group: Any) -> Iterator[KVGroup]:
    """The group's layers, apart by format where vLLM lets several formats share a block table."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
        group.layer_names, group.kv_cache_spec
    )
    by_spec: dict[Any, list[str]] = {}
    for layer in group.layer_names:
        by_spec.setdefault(specs[layer], []).append(layer)
    for spec, layers in by_spec.items():
        yield _group(stage, index, tuple(layers), spec)


def _group(stage: int, index: int, layers: tuple[str, ...], spec: Any) -> KVGroup:
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, get_kv_cache_spec_kind

    sized = isinstance(spec, (AttentionSpec, MambaSpec))
    kind = get_kv_cache_spec_kind(spec).value
    return KVGroup(
        stage=stage,
        index=index,
        layers=layers,
        kind=kind,
        heads=spec.num_heads if sized else 1,
        head_dim=getattr(spec, "head_size", 0),
        row_bytes=spec.num_heads * spec.state_content_size_bytes if sized else 0,
        dtype=_name(spec.dtype) if isinstance(spec, AttentionSpec) else OPAQUE,
        quantisation=getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"),
        tokens_per_state=str(spec.tokens_per_state) if sized else "-1",
        extra=tuple(sorted((*_extra(spec), *(_interior(spec, kind) if isinstance(spec, AttentionSpec) else ())))),
    )


def _extra(spec: Any) -> tuple[tuple[str, str], ...]:
    """The spec's other fields that differ from their defaults, as text."""
    left_out = _NOT_THE_BYTES | _OWN_FIELDS
    found = []
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name not in left_out and value != field.default:
            found.append((field.name, json.dumps(canonical(value), sort_keys=True)))
    return tuple(sorted(found))


def _interior(spec: Any, kind: str) -> Iterator[tuple[str, str]]:
    """What decides where in a block the bytes of a token lie; nothing where each token has a row of its own.

    LMCache cuts blocks into rows and takes each for one token's. That holds for most caches, so that block size and
    order do not matter. On the CPU keys lie token by token within each element or in tiles, as the processor likes
    them, and values behind all keys; NVFP4 keeps the scales of a block behind its data. Such blocks can be put back
    only as they were taken: whole, in blocks of the same size, and on the CPU by the same instructions.
    """
    if _on_cpu() and "mla" not in kind:
        yield "interior", f"{_processor()}, blocks of {spec.block_size}"
    elif spec.kv_quant_mode.name.startswith("NVFP4"):
        yield "interior", f"blocks of {spec.block_size}"


def _processor() -> str:
    """What vLLM chooses its CPU kernels by, and with them the place of each key in a block."""
    import torch

    return platform.machine() + ("+amx" if torch.cpu._is_amx_tile_supported() else "")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
