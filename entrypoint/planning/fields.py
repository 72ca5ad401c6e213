"""What the fields of a configuration must be: checked here, once, before anything is computed with them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from patches.framework.errors import PlanError

__all__ = ["MOST_LAYERS", "check"]

MOST_LAYERS = 10_000
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Kind:
    """What a field must be.

    Attributes:
        wanted: In words.
        fits: Whether a value is that.
    """

    wanted: str
    fits: Callable[[Any], bool]


def _whole(low: int, high: int = _MOST) -> Kind:
    def fits(value: Any) -> bool:
        return type(value) is int and low <= value <= high

    return Kind(f"a whole number from {low} to {high}", fits)


def _list_of(items: str, each: Callable[[Any], bool], length: int | None = None) -> Kind:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(each, value))

    return Kind(f"a list of {items}", fits)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MOST


_DTYPES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double", "float8_e4m3fn", "float8_e5m2")


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value.removeprefix("torch.") in _DTYPES


_SIZE, _COUNT = _whole(1), _whole(0)
_TEXT = Kind("a string", _is_text)
_TEXTS = _list_of("strings", _is_text)
_TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_POSITIVE = Kind(f"a number above 0, up to {_MOST}", _is_positive)
_DTYPE = Kind(f"one of {', '.join(_DTYPES)}", _is_dtype)

_SIZES = (
    "decoder_sparse_step", "head_dim", "hidden_size", "index_head_dim", "index_n_heads", "index_topk", "kv_lora_rank",
    "max_position_embeddings", "model_max_length", "moe_intermediate_size", "moe_layer_freq", "n_routed_experts",
    "num_attention_heads", "num_experts", "num_experts_per_tok", "num_key_value_heads", "num_local_experts",
    "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size",
)  # fmt: skip
_COUNTS = ("first_k_dense_replace", "intermediate_size", "n_shared_experts", "shared_expert_intermediate_size")
_TRUTHS = ("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "use_sliding_window")
_FIELDS: dict[str, Kind] = {
    "architectures": _TEXTS,
    "dtype": _DTYPE,
    "layer_types": _TEXTS,
    "mlp_layer_types": _TEXTS,
    "mlp_only_layers": _list_of("layers' numbers", _COUNT.fits),
    "num_hidden_layers": _whole(1, MOST_LAYERS),
    "quantization_config": _OBJECT,
    "rope_parameters": _OBJECT,
    "rope_scaling": _OBJECT,
    "topk_method": _TEXT,
    "torch_dtype": _DTYPE,
    **dict.fromkeys(_SIZES, _SIZE),
    **dict.fromkeys(_COUNTS, _COUNT),
    **dict.fromkeys(_TRUTHS, _TRUTH),
}
_ROPE = {"rope_type": _TEXT, "type": _TEXT, "factor": _POSITIVE, "original_max_position_embeddings": _SIZE}
_QUANTISATION = {
    "quant_method": _TEXT,
    "weight_block_size": _list_of("two whole numbers from 1 on", _SIZE.fits, 2),
    "modules_to_not_convert": _TEXTS,
    "ignored_layers": _TEXTS,
}
_INSIDE = {"quantization_config": _QUANTISATION, "rope_parameters": _ROPE, "rope_scaling": _ROPE}


def check(config: Mapping[str, Any]) -> None:
    """Refuse a configuration with a field that is not what it must be; what is missing or null passes.

    Raises:
        PlanError: names the field, what it is and what was wanted.
    """
    _check(_FIELDS, config, "")
    for name, fields in _INSIDE.items():
        _check(fields, config.get(name) or {}, f"{name}.")


def _check(fields: Mapping[str, Kind], values: Mapping[str, Any], prefix: str) -> None:
    for name, kind in fields.items():
        value = values.get(name)
        if value is not None and not kind.fits(value):
            found = f"{prefix}{name} {reprlib.repr(value)} in the configuration"
            raise PlanError(found, kind.wanted, "Correct the config.json.")
