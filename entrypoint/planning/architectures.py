"""From ``config.json`` to a model's shape, for the architectures that are known to the byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from entrypoint.planning import configuration, fields, quantisation
from entrypoint.planning.shape import Experts, GroupedAttention, Indexer, LatentAttention, ModelShape
from patches.framework import checkpoint
from patches.framework.errors import PlanError

__all__ = ["ARCHITECTURES", "read"]

Config = Mapping[str, Any]


def read(model: str, scheme: str | None = None, *, weigh: bool = True) -> ModelShape:
    """The shape of the model in a folder (or in the hub's local cache).

    Args:
        model: The folder, or the name.
        scheme: ``--quantization``, or None.
        weigh: Whether the weights' storage scheme matters.

    Raises:
        PlanError: there is no configuration, or it has something that is not modelled.
    """
    config = configuration.read(model)
    made = shape(config, scheme, weigh=weigh)
    declared = checkpoint.declared_kv_quantisation(config)
    return replace(made, declared_kv=declared, kv_scales=bool(declared) or quantisation.brings_kv_scales(config))


def shape(config: Config, scheme: str | None = None, *, weigh: bool = True) -> ModelShape:
    """The shape that a configuration describes.

    Args:
        config: The configuration.
        scheme: ``--quantization``, or None.
        weigh: Whether the weights' storage scheme matters.

    Raises:
        PlanError: a field is not what it must be, or the model has something that is not modelled.
    """
    fields.check(config)
    architecture = ", ".join(config.get("architectures") or ()) or "unnamed"
    reader = ARCHITECTURES.get(architecture)
    if reader is None:
        raise PlanError(f"the architecture {architecture}", f"one of {', '.join(sorted(ARCHITECTURES))}", _MEASURE)
    _refuse_what_is_not_modelled(config)
    _refuse_what_is_left_out(config, architecture)
    ignored = () if weigh else ("quantization_config",)
    known = {key: value for key, value in config.items() if value is not None and key not in ignored}
    try:
        return reader(known, architecture, scheme if weigh else None)
    except KeyError as error:
        raise PlanError(f"a configuration of {architecture} without {error}", "a complete one", "Correct it.") from None


_MEASURE = "Start it once, and read what it prints."
_MODELLED: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (),
    "audio_config": (),
    "dual_chunk_attention_config": (),
    "index_topk_freq": (1,),
    "layer_types": (),
    "num_kv_shared_layers": (),
    "sliding_window": (),
    "vision_config": (),
}
"""What changes the KV cache or the weights, and its values that do not."""


def _refuse_what_is_not_modelled(config: Config) -> None:
    for key, modelled in _MODELLED.items():
        value = config.get(key)
        if value and value not in modelled and not _unused(config, key):
            raise PlanError(f"{key} {_short(value)} in the configuration", "a model without it", _MEASURE)


_GROUPED, _DEEPSEEK = ("num_key_value_heads",), ("first_k_dense_replace", "n_shared_experts", "q_lora_rank")
_NAMED: dict[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": (*_DEEPSEEK, "index_topk"),
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "MistralForCausalLM": (*_GROUPED, "sliding_window"),
    "MixtralForCausalLM": _GROUPED,
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen2MoeForCausalLM": (*_GROUPED, "shared_expert_intermediate_size"),
    "Qwen3ForCausalLM": (*_GROUPED, "head_dim"),
    "Qwen3MoeForCausalLM": _GROUPED,
}
"""What a configuration must name, if only as null: where it is left out, Transformers has a number of its own."""


def _refuse_what_is_left_out(config: Config, architecture: str) -> None:
    window = ("sliding_window",) if config.get("use_sliding_window") else ()
    for name in (*_NAMED.get(architecture, ()), *window):
        if name not in config:
            raise PlanError(f"a configuration of {architecture} without '{name}'", "a complete one", "Correct it.")


def _unused(config: Config, key: str) -> bool:
    if key == "layer_types":
        return set(config[key]) <= {"full_attention", "indexed_attention"}
    return key == "sliding_window" and config.get("use_sliding_window") is False


def _short(value: Any) -> str:
    """A value for a message; of a list each of its values once."""
    return ", ".join(sorted(set(map(str, value)))) if isinstance(value, list) else repr(value)


def _common(config: Config, architecture: str, scheme: str | None) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "vocabulary": config["vocab_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "intermediate": config.get("intermediate_size") or 0,
        "max_len": _max_len(config),
        "limit": _limit(config),
        "dtype": _served_dtype(config),
        "quantisation": quantisation.read(config, scheme),
        "mlp_bias": False,
        "experts": None,
        "sparse": frozenset(),
    }


def _served_dtype(config: Config) -> str:
    """What ``--dtype auto`` makes of the checkpoint's dtype: vLLM serves float32 in 16 bits."""
    named = checkpoint.dtype(config) or "bfloat16"
    return "bfloat16" if named in ("float32", "float") else named


_UNSCALED = ("default", "llama3")
"""Position schemes whose factor is already in ``max_position_embeddings``, or that have none."""


def _scaling(config: Config) -> tuple[str, Config]:
    """How positions are scaled: the kind's name, and its parameters."""
    named = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = {key: value for key, value in named.items() if value is not None}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    of_each_layer_type = any(isinstance(value, dict) for value in scaling.values())
    scaled = of_each_layer_type or (kind == "default" and scaling.get("factor", 1) != 1)
    return ("unknown" if scaled else kind), scaling


def _limit(config: Config) -> int | None:
    """Longest ``--max-model-len`` that vLLM accepts; None where positions are scaled: releases differ there."""
    return _unscaled_len(config) if _scaling(config)[0] in _UNSCALED else None


def _unscaled_len(config: Config) -> int | None:
    """What the configuration names; ``model_max_length`` comes first, as in vLLM."""
    return config.get("model_max_length") or config.get("max_position_embeddings")


def _max_len(config: Config) -> int | None:
    """Longest sequence that the configuration promises, or None where its scaling of positions is not a known one."""
    kind, scaling = _scaling(config)
    if kind in _UNSCALED:
        return _unscaled_len(config)
    if kind == "yarn" and "original_max_position_embeddings" in scaling:
        return int(scaling["original_max_position_embeddings"] * scaling["factor"])
    return None


def _grouped(config: Config, **fields: Any) -> GroupedAttention:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise PlanError(
            f"num_attention_heads {heads} with num_key_value_heads {kv_heads}", "a multiple of it", "Correct them."
        )
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        **fields,
    )


def _llama(config: Config, architecture: str, scheme: str | None) -> ModelShape:
    bias = bool(config.get("attention_bias", False))
    common = _common(config, architecture, scheme) | {"mlp_bias": bool(config.get("mlp_bias", False))}
    return ModelShape(**common, attention=_grouped(config, qkv_bias=bias, output_bias=bias))


def _qwen2(config: Config, architecture: str, scheme: str | None) -> ModelShape:
    return ModelShape(**_common(config, architecture, scheme), attention=_grouped(config, qkv_bias=True))


def _qwen3(config: Config, architecture: str, scheme: str | None) -> ModelShape:
    attention = _grouped(config, qkv_bias=bool(config.get("attention_bias", False)), qk_norm=True)
    return ModelShape(**_common(config, architecture, scheme), attention=attention)


def _mixtral(config: Config, architecture: str, scheme: str | None) -> ModelShape:
    experts = Experts(_experts(config), config["intermediate_size"], config["num_experts_per_tok"])
    common = _common(config, architecture, scheme)
    return ModelShape(**common | _every_layer(config, experts), attention=_grouped(config))


def _experts(config: Config) -> int:
    """Routed experts; Transformers 5 saves some models with another's name for it."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    found = [config[name] for name in names if name in config]
    if not found:
        raise KeyError(names[0])
    return int(found[0])


def _every_layer(config: Config, experts: Experts) -> dict[str, Any]:
    return {"experts": experts, "sparse": frozenset(range(config["num_hidden_layers"])), "ends_everywhere": True}


def _qwen_moe(config: Config, *, shared: bool) -> dict[str, Any]:
    """The sparse layers of a Qwen model: every ``decoder_sparse_step``-th one but those that are named dense."""
    width = config.get("shared_expert_intermediate_size") or 0
    experts = Experts(
        number=_experts(config),
        intermediate=config["moe_intermediate_size"],
        top_k=config["num_experts_per_tok"],
        shared_intermediate=width if shared else 0,
        shared_gate=shared and width > 0,
        router_follows=not shared,
    )
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return {
        "experts": experts,
        "sparse": frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        "ends_everywhere": True,
    }


def _qwen2_moe(config: Config, architecture: str, scheme: str | None) -> ModelShape:
    common = _common(config, architecture, scheme) | _qwen_moe(config, shared=True)
    return ModelShape(**common, attention=_grouped(config, qkv_bias=bool(config.get("qkv_bias", True))))


def _qwen3_moe(config: Config, architecture: str, scheme: str | None) -> ModelShape:
    common = _common(config, architecture, scheme) | _qwen_moe(config, shared=False)
    attention = _grouped(config, qkv_bias=bool(config.get("attention_bias", False)), qk_norm=True)
    return ModelShape(**common, attention=attention)


def _deepseek(config: Config, architecture: str, scheme: str | None) -> ModelShape:
    sparse_attention = config.get("index_topk") is not None
    attention = LatentAttention(
        heads=config["num_attention_heads"],
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        v_dim=config["v_head_dim"],
        indexer=Indexer(config["index_n_heads"], config["index_head_dim"]) if sparse_attention else None,
    )
    return ModelShape(**_common(config, architecture, scheme) | _deepseek_experts(config), attention=attention)


def _deepseek_experts(config: Config) -> dict[str, Any]:
    width = config["moe_intermediate_size"]
    experts = Experts(
        number=_experts(config),
        intermediate=width,
        top_k=config["num_experts_per_tok"],
        shared_intermediate=width * (config.get("n_shared_experts") or 0),
        shared_whole=True,
        correction_bias=config.get("topk_method") == "noaux_tc",
    )
    first, every = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    layers = range(first, config["num_hidden_layers"])
    sparse = frozenset(layer for layer in layers if layer % every == 0)
    named = config.get("mlp_layer_types")
    if named and sparse != {layer for layer, kind in enumerate(named) if kind == "sparse"}:
        raise PlanError("mlp_layer_types that are not those of first_k_dense_replace", "one of them", _MEASURE)
    return {"experts": experts, "sparse": sparse}


ARCHITECTURES: dict[str, Callable[[Config, str, str | None], ModelShape]] = {
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV32ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
"""Reader by the architecture's name."""
