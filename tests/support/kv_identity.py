"""Cache keys as a real engine would make them: vLLM's own configuration and planning, LMCache's own key making.

``python -m support.kv_identity FOLDER [NUMBER ...]`` (with the patches on) prints, for the named or else all cases of
``cases/kv_fingerprint.json``, the keys of writer and reader as JSON; None stands for a request that bypasses the cache.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from entrypoint.local.model import make_tiny_model
from support.planning import kv_cache_configs

__all__ = ["CASES", "Engine", "request"]

CASES = json.loads((Path(__file__).parents[1] / "cases" / "kv_fingerprint.json").read_text(encoding="utf-8"))["pairs"]
CONNECTOR = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROPE = {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}


class Engine:
    """An engine's configuration, taken through the seams of its start, workers left out.

    Attributes:
        config: vLLM's ``VllmConfig``.
        kv_configs: The KV cache configuration of each worker, and the scheduler's last.
        executor: vLLM's ``Executor`` without workers.
    """

    def __init__(self, model: str, *, stages: int = 1, kv_layout: str = "LBHNC", **arguments: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

        given = {"max_model_len": 2048, "dtype": "bfloat16", "kv_transfer_config": CONNECTOR, **arguments}
        self.config = EngineArgs(model=model, **given).create_engine_config()
        self._start()
        register_all_kvcache_specs(self.config)
        self.config.cache_config.kv_cache_layout = kv_layout
        specs = [self._specs(stage, stages) for stage in range(stages)]
        configs = kv_cache_configs(self.config, specs, [1 << 28] * stages)
        self.kv_configs = [*configs, generate_scheduler_kv_cache_config(configs)]

    def _start(self) -> None:
        from vllm.v1.executor.abstract import Executor

        class Idle(Executor):  # type: ignore[misc]
            def _init_executor(self) -> None: ...
            def collective_rpc(self, *_: Any, **__: Any) -> Any:
                return []

            def check_health(self) -> None: ...

        self.executor = Idle(self.config)

    def _specs(self, stage: int, stages: int) -> dict[str, Any]:
        """What the workers of a stage would say of their layers."""
        from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
        from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

        model, cache = self.config.model_config, self.config.cache_config
        spec = FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=model.get_num_kv_heads(self.config.parallel_config),
            head_size=model.get_head_size(),
            dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
            kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
        )
        layers = range(model.hf_text_config.num_hidden_layers)
        return {f"model.layers.{n}.self_attn.attn": spec for n in layers if n * stages // len(layers) == stage}

    @property
    def names(self) -> list[str]:
        """The model's name in the keys of each worker and of the scheduler."""
        from lmcache.integration.vllm.lmcache_mp_connector import get_dcp_decorated_model_name

        return [get_dcp_decorated_model_name(self.config, config) for config in self.kv_configs]

    def key(self, **fields: Any) -> str | None:
        """Model name and salt of a request's keys; None where it bypasses the cache."""
        from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState, LMCacheMPRequestTracker
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename

        tracker = LMCacheMPRequestTracker(request(**fields))
        if tracker.state is LMCacheMPRequestState.BYPASS_LMCACHE:
            return None
        (name,) = set(self.names)
        return str(_object_key_to_filename(ObjectKey(b"\0" * 32, name, 0, 0, tracker.cache_salt)))


def request(*, tokens: int = 300, transfer: dict[str, Any] | None = None, **fields: Any) -> Any:
    """vLLM's ``Request`` of ``tokens`` equal token ids, as the scheduler holds it.

    Args:
        tokens: Length of the prompt.
        transfer: The client's ``kv_transfer_params``.
        fields: More of ``Request``'s own arguments.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    extra = None if transfer is None else {"kv_transfer_params": transfer}
    given = {"prompt_token_ids": [5] * tokens, "sampling_params": SamplingParams(extra_args=extra), **fields}
    return Request(request_id="request", pooling_params=None, **given)


def adapter(folder: Path, content: bytes, *, name: str = "adapter", number: int = 1, **fields: Any) -> Any:
    """vLLM's ``LoRARequest`` for an adapter whose one tensor is ``content``."""
    from vllm.lora.request import LoRARequest

    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"q": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    return LoRARequest(name, number, str(folder), **fields)


def _arguments(side: dict[str, Any]) -> dict[str, Any]:
    """The case file's names as vLLM's; ranks of TP x PP are all there."""
    names = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
    return {names.get(name, name): value for name, value in side.items()} | {"stages": side.get("pp", 1)}


def _other_weights(model: str, folder: Path) -> list[str | None]:
    copy = folder / "weights"
    shutil.copytree(model, copy)
    keys = [Engine(str(copy)).key()]
    (file,) = copy.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes(byte ^ 1 for byte in data[start:])
    file.write_bytes(bytes(data))
    return [*keys, Engine(str(copy)).key()]


def _revisions(model: str, folder: Path) -> list[str | None]:
    """Two snapshots of one repository in the hub's cache, by the commit in their path alone."""
    keys = []
    for commit in (COMMIT, COMMIT[::-1]):
        snapshot = folder / "models--org--tiny" / "snapshots" / commit
        shutil.copytree(model, snapshot)
        engine = Engine(str(snapshot))
        with patch.object(engine.config.model_config, "model", "org/tiny"):
            keys.append(engine.key())
    return keys


def _layouts(model: str, _folder: Path) -> list[str | None]:
    from patches.lmcache_identity import deriving

    with (
        patch.object(deriving, "release_of", lambda _library: "0.25.1"),
        patch.object(deriving, "_on_cpu", lambda: False),
    ):
        before = Engine(model).key()
    return [before, Engine(model).key()]


def _block_sizes(model: str, _folder: Path) -> list[str | None]:
    """On a GPU: on the CPU a token's bytes lie where the block size puts them, and nothing may be shared."""
    from patches.lmcache_identity import deriving

    with patch.object(deriving, "_on_cpu", lambda: False):
        return [Engine(model, block_size=size).key() for size in (128, 256)]


def _scales(model: str, _folder: Path) -> list[str | None]:
    """Such an engine is refused at its start, so it has no keys."""
    from vllm.config import CacheConfig

    from patches.framework.errors import ProfileError

    with patch.object(CacheConfig, "calculate_kv_scales", True, create=True):
        try:
            return [Engine(model).key(), Engine(model).key()]
        except ProfileError as error:
            return [None, str(error)]


def _adapters(model: str, folder: Path) -> list[str | None]:
    engine = Engine(model)
    one = adapter(folder / "one", b"a" * 64)
    other = adapter(folder / "other", b"b" * 64, number=2)
    return [engine.key(lora_request=one), engine.key(lora_request=other)]


def _embeddings(model: str, _folder: Path) -> list[str | None]:
    import torch

    engine = Engine(model)
    return [engine.key(prompt_token_ids=None, prompt_embeds=torch.full((300, 128), value)) for value in (0.0, 1.0)]


def _client_tag(model: str, folder: Path) -> list[str | None]:
    """A client that names another engine's namespace, or another adapter's, does not get there."""
    engine, other = Engine(model), Engine(model, kv_cache_dtype="fp8_e5m2")
    victim = adapter(folder / "victim", b"v" * 64, number=3)
    theirs = engine.key(lora_request=victim)
    fingerprint = other.names[0].rpartition("-kv1-")[2]
    transfer = {"lmcache.tag.kvfp": fingerprint, "lmcache.tag.splint": fingerprint, "model_name": other.names[0]}
    salt = str(theirs).rpartition("@")[2].removesuffix(".data")
    forged = engine.key(transfer=transfer, cache_salt=salt)
    return [theirs, forged if forged != other.key() else other.key()]


_OWN: dict[str, Callable[[str, Path], list[str | None]]] = {
    "another revision of the model under one name": _revisions,
    "split KV and packed KV (vLLM before and after the layout change)": _layouts,
    "another vLLM block size, the same chunk size (MP)": _block_sizes,
    "another LoRA adapter, the same prompt": _adapters,
    "scales computed at run time (calculate_kv_scales)": _scales,
    "other weights under the same local path": _other_weights,
    "prompt embeddings of equal length": _embeddings,
    "a client that sends its own cache tag": _client_tag,
}
_DP = {"data_parallel_size": 2, "data_parallel_address": "127.0.0.1", "data_parallel_size_local": 1}
_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the same configuration in two processes, different PYTHONHASHSEED": ({}, {}),
    "NHD and HND views of the same canonical object (MP)": ({"kv_layout": "LBNHC"}, {"kv_layout": "LBHNC"}),
    "data-parallel ranks of one deployment": (
        {**_DP, "data_parallel_rank": 0},
        {**_DP, "data_parallel_rank": 1},
    ),
    "another EP size": ({"enable_expert_parallel": False}, {"enable_expert_parallel": True}),
    "other RoPE scaling or other hf_overrides": ({}, {"hf_overrides": ROPE}),
    "other weight quantisation": ({}, {"quantization": "fp8"}),
    "one pipeline stage's own shape": ({"pp": 2}, {"pp": 2}),
}
_SHAPES = ({"num_key_value_heads": 1}, {"head_dim": 32}, {"num_hidden_layers": 1})


def keys_of(case: dict[str, Any], model: str, folder: Path) -> list[str | None]:
    """The keys of a case's writer and readers."""
    what = case["what"]
    if what in _OWN:
        return _OWN[what](model, folder / str(CASES.index(case)))
    if what == "another number of KV heads, head size or layers under one model name":
        return [Engine(model, hf_overrides=shape).key() for shape in ({}, *_SHAPES)]
    writer, reader = _PAIRS.get(what) or (case["writer"], case["reader"])
    return [Engine(model, **_arguments(writer)).key(), Engine(model, **_arguments(reader)).key()]


def main() -> None:
    """Print the keys of all cases, one JSON list in the order of the file."""
    folder = Path(sys.argv[1])
    model = str(make_tiny_model(folder=folder.parent))
    wanted = [CASES[int(number)] for number in sys.argv[2:]] or CASES
    print(json.dumps([keys_of(case, model, folder) for case in wanted]))


if __name__ == "__main__":
    main()
