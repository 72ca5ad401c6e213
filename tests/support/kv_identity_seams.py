"""What the seams of kv_profile and lmcache_identity do on vLLM's and LMCache's own objects.

``python -m support.kv_identity_seams FOLDER`` (with the patches on) runs every scenario and prints its answer as JSON.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from entrypoint.local.model import make_tiny_model
from patches.framework.errors import SplintError
from support.kv_identity import CONNECTOR, Engine, adapter, request

__all__ = ["SCENARIOS", "NoConnector", "NoWorker"]

_MP = "lmcache.integration.vllm.lmcache_mp_connector"
ELSEWHERE = {"kv_connector": "NoConnector", "kv_connector_module_path": "support.kv_identity_seams",
             "kv_role": "kv_both", "kv_connector_extra_config": {"for": "lmcache"}}  # fmt: skip


class NoWorker:
    """Stands where a worker would load the model."""

    def __init__(self, **_: Any) -> None: ...


class NoConnector:
    """Stands where LMCache's connector would look for its server."""

    def __init__(self, _config: Any, _role: Any, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config

    @staticmethod
    def request_finished_all_groups() -> None: ...


def _said(call: Callable[[], Any]) -> str:
    """What a refusal says, or ``started``."""
    try:
        call()
    except SplintError as error:
        return f"{type(error).__name__}: {error}"
    return "started"


def _start_worker(config: Any) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    config.parallel_config.worker_cls = "support.kv_identity_seams.NoWorker"
    # It goes through every loaded module, which this process has too many of.
    with patch.object(type(current_platform), "register_triton_kernel_overrides"):
        WorkerWrapperBase().init_worker([{"vllm_config": config}])


def a_worker_that_sees_what_the_engine_core_saw(model: str, _folder: Path) -> Any:
    import pickle

    config = Engine(model, kv_cache_dtype="fp8_e5m2").config
    return _said(lambda: _start_worker(pickle.loads(pickle.dumps(config))))


def a_worker_on_a_node_with_other_weights(model: str, folder: Path) -> Any:
    shutil.copytree(model, folder / "copy")
    config = Engine(str(folder / "copy")).config
    (file,) = (folder / "copy").glob("*.safetensors")
    file.write_bytes(file.read_bytes() + b"\0")
    return _said(lambda: _start_worker(config))


def a_worker_whose_configuration_was_changed_on_the_way(model: str, _folder: Path) -> Any:
    config = copy.deepcopy(Engine(model).config)
    config.cache_config.cache_dtype = "fp8_e4m3"
    return _said(lambda: _start_worker(config))


def a_worker_whose_engine_core_has_no_patches(model: str, _folder: Path) -> Any:
    config = Engine(model).config
    del vars(config)["splint_kv_profile"]
    return _said(lambda: _start_worker(config))


def a_worker_without_an_external_cache(model: str, _folder: Path) -> Any:
    config = Engine(model, kv_transfer_config=None).config
    return _said(lambda: _start_worker(config))


def _connect(engine: Engine, number: int = -1) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    return KVConnectorFactory.create_connector(engine.config, KVConnectorRole.SCHEDULER, engine.kv_configs[number])


def _elsewhere(model: str, **arguments: Any) -> Engine:
    engine = Engine(model, kv_transfer_config=ELSEWHERE, **arguments)
    engine.config.scheduler_config.disable_hybrid_kv_cache_manager = True
    return engine


def a_connector_with_a_profile_publishes_it(model: str, _folder: Path) -> Any:
    from patches.framework import process

    engine = _elsewhere(model, kv_cache_dtype="fp8_e5m2")
    _connect(engine)
    current = process.current()
    return {"engine": engine.names[0], "note": current.facts["kv_profile"] if current else None}


def a_connector_without_a_profile(model: str, _folder: Path) -> Any:
    engine = _elsewhere(model)
    del vars(engine.kv_configs[-1])["splint_kv_profile"]
    return _said(lambda: _connect(engine))


def keys_of_every_kv_format(model: str, _folder: Path) -> Any:
    from typing import get_args

    from vllm.config.cache import CacheDType

    return {name: Engine(model, kv_cache_dtype=name).key() for name in get_args(CacheDType)}


def keys_of_transfer_modes(model: str, _folder: Path) -> Any:
    """By what the connector is told, and what the environment says."""

    def key(connector: dict[str, Any], environ: str | None = None) -> str | None:
        given = {} if environ is None else {"LMCACHE_MP_TRANSFER_MODE": environ}
        with patch.dict(os.environ, given):
            return Engine(model, kv_transfer_config=connector).key()

    def told(mode: str) -> dict[str, Any]:
        return CONNECTOR | {"kv_connector_extra_config": {"lmcache.mp.mp_transfer_mode": mode}}

    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return {
        "nothing": key(CONNECTOR),
        "auto": key(told("auto"), "lmcache_driven"),
        "its own": key(told("engine_driven")),
        "the other": key(told("lmcache_driven")),
        "environment": key(CONNECTOR, "lmcache_driven"),
        "one of several": key(several | {"kv_connector_extra_config": {"connectors": [told("lmcache_driven")]}}),
    }


def keys_of_speculative_models(model: str, folder: Path) -> Any:
    """The draft model's layers are stored with the target's: none, one, a copy of it, and one with other weights."""

    def key(draft: Path) -> str | None:
        given = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
        return Engine(model, speculative_config=given).key()

    for name in ("one", "copy", "other"):
        shutil.copytree(model, folder / name)
    (file,) = (folder / "other").glob("*.safetensors")
    file.write_bytes(file.read_bytes() + b"\0")
    return {"none": Engine(model).key()} | {name: key(folder / name) for name in ("one", "copy", "other")}


def a_worker_with_another_transfer_mode_in_its_environment(model: str, _folder: Path) -> Any:
    config = Engine(model).config
    with patch.dict(os.environ, {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}):
        return _said(lambda: _start_worker(config))


def keys_of_blocks_that_are_no_rows(model: str, _folder: Path) -> Any:
    """Engines whose blocks can't be cut into rows of one token each, and others that are not of their kind."""
    import torch

    from patches.lmcache_identity import deriving

    keys = {str(size): Engine(model, block_size=size).key() for size in (128, 256)}
    for tiles in (False, True):
        with patch.object(torch.cpu, "_is_amx_tile_supported", lambda answer=tiles: answer):
            keys[f"tiles {tiles}"] = Engine(model, block_size=128).key()
    with patch.object(deriving, "_on_cpu", lambda: False):
        for size in (128, 256):
            keys[f"nvfp4 {size}"] = Engine(model, kv_cache_dtype="nvfp4", block_size=size).key()
    return keys


def bytes_between_block_sizes_on_the_cpu(_model: str, _folder: Path) -> Any:
    """What an engine with blocks of each size reads, after LMCache has brought it what one with 128 has written."""
    import torch
    from lmcache.v1.multiprocess.transfer_context.base import gather_paged_kv_to_cpu, scatter_cpu_to_paged_kv
    from vllm import _custom_ops

    heads, head_size, tokens, hints = 2, 64, 256, {"kv_layout": "HND"}

    def empty(size: int) -> Any:
        return torch.zeros(tokens // size, heads, size, 2 * head_size, dtype=torch.bfloat16)

    def written(size: int) -> Any:
        keys = torch.arange(tokens * heads * head_size).to(torch.bfloat16).view(tokens, heads, head_size)
        cache = empty(size)
        halves = cache.view(tokens // size, heads, 2 * size, head_size).chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(keys, -keys, *halves, torch.arange(tokens), "vec")
        return cache

    chunks = gather_paged_kv_to_cpu({"layer": written(128)}, [0, 1], 2, layout_hints=hints)
    same = {}
    for size in (128, 64):
        cache, count = empty(size), tokens // size
        scatter_cpu_to_paged_kv({"layer": cache}, [*range(count)], chunks, count, layout_hints=hints)
        same[str(size)] = torch.equal(cache, written(size))
    return same


def keys_without_a_profile(model: str, _folder: Path) -> Any:
    engine = Engine(model)
    for config in engine.kv_configs:
        del vars(config)["splint_kv_profile"]
    return _said(lambda: engine.names)


def vllms_bundled_connector_in_place_of_lmcaches(model: str, _folder: Path) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector as module

    engine = _elsewhere(model)
    with patch.object(module, "LMCacheMPConnector", module.LMCacheMPConnectorUpstream):
        return _said(lambda: _connect(engine))


def _tensors(engine: Engine, **changes: Any) -> dict[str, Any]:
    """KV tensors as vLLM's model runner makes them, of a spec with ``changes``."""
    from dataclasses import replace

    import torch
    from vllm.v1.kv_cache_interface import compute_layout_strides, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    config = engine.kv_configs[0]
    group, blocks = config.kv_cache_groups[0], 4
    spec = replace(group.kv_cache_spec, **changes)
    layout = KVCacheLayout[engine.config.cache_config.kv_cache_layout]
    size = spec.page_size_bytes * blocks * len(group.layer_names)
    strides = compute_layout_strides(spec, blocks, len(group.layer_names), layout)
    place = type(config.kv_cache_tensors[0])(
        size=size, layers=group.layer_names, layer_stride=strides[0], block_stride=strides[1]
    )
    views = create_kv_cache_views(torch.zeros(size, dtype=torch.int8), spec, blocks, layout, place)
    return dict(zip(group.layer_names, views, strict=True))


def _register(engine: Any, tensors: dict[str, Any]) -> str:
    """Whether the real connector gets as far as LMCache's own registration."""
    from lmcache.integration.vllm import lmcache_mp_connector as module

    connector = object.__new__(module.LMCacheMPConnector)
    connector._kv_cache_config = engine.kv_configs[0]
    connector._vllm_config = engine.config
    with patch.object(module, "apply_kv_cache_group_edits", side_effect=InterruptedError):
        try:
            return _said(lambda: connector.register_kv_caches(tensors))
        except InterruptedError:
            return "registered"


def tensors_that_are_what_the_profile_says(model: str, _folder: Path) -> Any:
    engines = [
        Engine(model, kv_cache_dtype=dtype, kv_layout=layout)
        for dtype in ("auto", "fp8_e5m2")
        for layout in ("LBHNC", "LBNHC", "BLHNC")
    ]
    return [_register(engine, _tensors(engine)) for engine in engines]


def tensors_that_differ_from_the_profile(model: str, _folder: Path) -> Any:
    import torch

    engine = Engine(model, kv_cache_dtype="fp8_e5m2")
    right = _tensors(engine)
    return {
        "dtype": _register(engine, _tensors(engine, dtype=torch.int8)),
        "width": _register(engine, _tensors(engine, dtype=torch.bfloat16)),
        "heads": _register(engine, _tensors(engine, num_kv_heads=1)),
        "head size": _register(engine, _tensors(engine, head_size=32, head_size_v=32)),
        "unknown layer": _register(engine, {**right, "draft.layers.0.attn": torch.zeros(4, 2, 128, 128)}),
        "shared layer": _register(engine, {**right, "draft.layers.0.attn": next(iter(right.values()))}),
    }


def layouts_that_vllm_tells_and_does_not_tell(model: str, _folder: Path) -> Any:
    """CacheConfig names the layout, or has not resolved it yet, or there is no such question in either place."""
    from types import SimpleNamespace

    engine = Engine(model)
    tensors = _tensors(engine)
    config = copy.copy(engine.config)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.kv_cache_layout = None
    try:
        unresolved = _register(SimpleNamespace(kv_configs=engine.kv_configs, config=config), tensors)
    except ValueError as error:
        unresolved = str(error)
    older = SimpleNamespace(cache_config=SimpleNamespace())
    return {
        "told": _register(engine, tensors),
        "unresolved": unresolved,
        "neither": _register(SimpleNamespace(kv_configs=engine.kv_configs, config=older), tensors),
    }


def prompt_embeddings_are_neither_looked_up_nor_stored(_model: str, _folder: Path) -> Any:
    import torch
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    connector = object.__new__(LMCacheMPConnector)
    connector._role, connector._eager_prefetch, connector.lazy_offload = KVConnectorRole.SCHEDULER, True, False
    connector.request_trackers = {}
    answers = []
    whole: dict[str, Any] = {"prompt_embeds": torch.zeros(300, 128)}
    part = MultiModalFeatureSpec(None, "prompt_embeds", "0" * 64, PlaceholderRange(offset=1, length=2))
    for fields in (
        {**whole, "prompt_token_ids": None}, {**whole, "prompt_is_token_ids": [False] * 300}, {"mm_features": [part]},
    ):  # fmt: skip
        asked = request(**fields)
        # Without a scheduler adapter any look-up fails.
        connector.on_new_request(asked)
        answers.append(connector.get_num_new_matched_tokens(asked, 0))
        tracker = connector.request_trackers.pop("request")
        tracker.append_block_ids(([1, 2, 3],))
        tracker.increase_num_scheduled_tokens(300)
        answers.append(LMCacheMPRequestMetadata.GetStoreMetadata(tracker, 128, [128]))
    return answers


def adapters_by_content(model: str, folder: Path) -> Any:
    engine = Engine(model)
    first = engine.key(lora_request=adapter(folder / "a", b"a" * 64))
    return {
        "bare": engine.key(),
        "first": first,
        "renamed copy": engine.key(lora_request=adapter(folder / "b", b"a" * 64, name="other", number=2)),
        "same name, other content": engine.key(lora_request=adapter(folder / "a", b"c" * 64, number=3)),
        "with a salt": engine.key(lora_request=adapter(folder / "d", b"a" * 64, number=4), cache_salt="tenant"),
        "reloaded in place": engine.key(lora_request=adapter(folder / "a", b"a" * 64, load_inplace=True)),
        "of the hub, not in its cache": engine.key(lora_request=_hub_adapter()),
        "salt alone": engine.key(cache_salt="tenant"),
    }


def the_longest_key_there_can_be(_model: str, folder: Path) -> Any:
    """File name of an object whose model, salt and adapter take all the room that is left to them."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename

    from patches.lmcache_identity.namespaces import salt_for
    from patches.lmcache_identity.profile import LONGEST_MODEL, key_name

    name = key_name("/a/b/c/d/e/f/g/h".ljust(LONGEST_MODEL, "x"), "kv1-0123456789ab")
    salts = [salt_for("é" * 36), salt_for("x" * 128), salt_for("a/b", "0" * 16), salt_for("x" * 50, "0" * 16)]
    files = [_object_key_to_filename(ObjectKey(b"\0" * 32, name, 0xFFFFFFFF, 0xFF, salt)) for salt in salts]
    for file in files:
        (folder / file).touch()
    return max(len(file.encode()) for file in files)


def adapters_under_one_path(model: str, folder: Path) -> Any:
    """The first is loaded, its files are overwritten, the second is loaded; only then the requests come."""
    engine = Engine(model)
    keys = {}
    alone = adapter(folder / "alone", b"x" * 64, number=20)
    first = adapter(folder / "now", b"x" * 64, number=21)
    engine.executor.add_lora(alone)
    engine.executor.add_lora(first)
    second = adapter(folder / "now", b"y" * 65, number=22)
    engine.executor.add_lora(second)
    for name, asked in {"alone": alone, "first": first, "second": second}.items():
        keys[name] = engine.key(lora_request=asked)
    bare = Engine(model, kv_transfer_config=None)
    unread = adapter(folder / "unread", b"z" * 64, number=23)
    bare.executor.add_lora(unread)
    (folder / "unread" / "adapter_model.safetensors").write_bytes(b"other")
    return keys | {"loaded without LMCache": engine.key(lora_request=unread)}


def one_adapter_in_engines_that_use_it_otherwise(model: str, folder: Path) -> Any:
    one = adapter(folder / "one", b"a" * 64)

    def key(**settings: Any) -> str | None:
        return Engine(model, enable_lora=True, **settings).key(lora_request=one)

    return {
        "whole": key(),
        "whole, with more room": key(max_loras=2, max_lora_rank=32),
        "whole, its dtype spelled out": key(lora_dtype="bfloat16"),
        "without the LoRA settings": Engine(model).key(lora_request=one),
        "one module": key(lora_target_modules=["o_proj"]),
        "two modules": key(lora_target_modules=["o_proj", "qkv_proj"]),
        "the same two": key(lora_target_modules=["qkv_proj", "o_proj"]),
        "another dtype": key(lora_dtype="float16"),
        "shared": key(enable_moe_shared_loras=True),
    }


def media_in_engines_that_process_them_otherwise(model: str, folder: Path) -> Any:
    """Fingerprints of engines whose settings are in none of the names that vLLM gives to images and the like."""
    from vllm.config.multimodal import MultiModalConfig

    from patches.lmcache_identity.deriving import derive

    def digest(path: str = model, **settings: Any) -> str:
        config = Engine(path).config
        config.model_config.multimodal_config = MultiModalConfig(**settings)
        return derive(config).digest

    copied = folder / "copy"
    shutil.copytree(model, copied)
    found = {
        "text alone": derive(Engine(model).config).digest,
        "the defaults": digest(),
        "a copy": digest(str(copied)),
        "more room": digest(mm_processor_cache_gb=1, limit_per_prompt={"image": 1}),
        "settings": digest(mm_processor_kwargs={"size": {"shortest_edge": 64}}),
        "other settings": digest(mm_processor_kwargs={"size": {"shortest_edge": 128}}),
        "pruned": digest(video_pruning_rate=0.5),
        "pruned otherwise": digest(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
        "an encoder in fp8": digest(mm_encoder_attn_dtype="fp8"),
    }
    (copied / "preprocessor_config.json").write_text('{"do_resize": false}')
    return found | {"another file": digest(str(copied))}


def weights_exchanged_in_a_running_engine(model: str, folder: Path) -> Any:
    """What vLLM's own worker says of each way, and which of them reached the model."""
    from types import SimpleNamespace
    from unittest.mock import MagicMock

    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    folder /= "weights"
    shutil.copytree(model, folder)

    def exchange(
        method: str, *args: Any, without: bool = False, on_cpu: bool = False, **kwargs: Any
    ) -> tuple[str, bool]:
        worker, reached = object.__new__(Worker), MagicMock()
        changes: dict[str, Any] = {"kv_transfer_config": None} if without else {}
        worker.vllm_config = Engine(str(folder), **changes).config
        if change is not None:
            change()
        worker.model_runner = SimpleNamespace(reload_weights=reached, get_model=reached)
        worker.weight_transfer_engine = reached
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker._set_draft_weight_update_target = reached
        with patch.object(type(current_platform), "is_cpu", lambda _: on_cpu):
            said = _said(lambda: getattr(worker, method)(*args, **kwargs))
        return said, bool(reached.mock_calls)

    change: Callable[[], Any] | None = None
    found = {
        "the same files": exchange("reload_weights"),
        "the same files, on the CPU": exchange("reload_weights", on_cpu=True),
        "the same files, on the CPU, no cache": exchange("reload_weights", on_cpu=True, without=True),
        "another folder": exchange("reload_weights", weights_path=model),
        "an iterator": exchange("reload_weights", iter(())),
        "a trainer": exchange("start_weight_update"),
        "a trainer, of the draft": exchange("start_draft_weight_update"),
        "zeros": exchange("reset_weights"),
        "zeros, no cache": exchange("reset_weights", without=True),
        "a trainer, no cache": exchange("start_weight_update", without=True),
        "another folder, no cache": exchange("reload_weights", None, model, without=True),
    }
    for level in (1, 2):
        found[f"a sleep of level {level}"] = _sleep(Engine(str(folder)).config, level)
    found["a sleep of level 2, no cache"] = _sleep(Engine(str(folder), kv_transfer_config=None).config, 2)
    (file,) = folder.glob("*.safetensors")
    change = partial(file.write_bytes, file.read_bytes() + b"\0")
    return found | {"files changed since the start": exchange("reload_weights")}


def _sleep(config: Any, level: int) -> tuple[str, bool]:
    """What vLLM's own engine core says, and whether it paused anything or sent its workers to sleep."""
    from unittest.mock import MagicMock

    from vllm.v1.engine.core import EngineCore

    core, reached = object.__new__(EngineCore), MagicMock()
    core.vllm_config, core.pause_scheduler, core.model_executor = config, reached, reached
    return _said(lambda: core.sleep(level)), bool(reached.mock_calls)


def _hub_adapter() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("hub", 9, "org/adapter")


def _database(engine: Engine, publish: bool = True) -> Any:
    """LMCache's own key maker of the in-process path, for a model with a long path."""
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.token_database import ChunkedTokenDatabase

    from patches.lmcache_identity import carrying

    profile = carrying.carried(engine.kv_configs[-1]) if publish else None
    with patch.object(carrying, "_published", profile):
        metadata = LMCacheMetadata(
            engine.config.model_config.model, 1, 1, 0, 0, torch.uint8, (2, 2, 256, 2, 64), chunk_size=256
        )
        return ChunkedTokenDatabase(LMCacheEngineConfig.from_defaults(chunk_size=256), metadata)


def _in_process_keys(database: Any, configs: dict[str, Any] | None = None) -> list[str]:
    return [key.to_string() for _, _, key in database.process_tokens(list(range(512)), request_configs=configs)]


def keys_of_the_in_process_path(model: str, _folder: Path) -> Any:
    from lmcache.utils import parse_cache_key

    engines = {name: Engine(model, kv_cache_dtype=name) for name in ("fp8_e4m3", "fp8_e5m2")}
    keys = {name: _in_process_keys(_database(engine)) for name, engine in engines.items()}
    return {
        **keys,
        "again": _in_process_keys(_database(Engine(model, kv_cache_dtype="fp8"))),
        "parsed": [parse_cache_key(key).to_string() for key in keys["fp8_e5m2"]],
        "without an engine": _in_process_keys(_database(engines["fp8_e4m3"], publish=False)),
    }


def _in_process(asked: Any) -> Any:
    """The settings with which the in-process path would look a request up, and whether it would."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    class Lookup:
        configs: Any = "not looked up"

        def lookup_cache(self, **_: Any) -> int:
            return -1

        def lookup(self, _tokens: Any, *, request_configs: Any, **_: Any) -> None:
            self.configs = request_configs

    connector = object.__new__(LMCacheConnectorV1Impl)
    connector._manager = type("Manager", (), {"lookup_client": Lookup()})()
    connector.kv_role, connector._requests_priority, connector.skip_last_n_tokens = "kv_both", {}, 0
    hits = connector.get_num_new_matched_tokens(asked, 0)
    return [hits, connector.lookup_client.configs, _stored(asked)]


def _stored(asked: Any) -> Any:
    """The settings with which it would be stored, or why not."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker
    from vllm.v1.core.sched.output import NewRequestData

    new = NewRequestData.from_request(asked, ([1, 2, 3],))
    tracker = RequestTracker.from_new_request(None, new, 300, 0, False)
    return "not stored" if tracker.skip_save else tracker.request_configs


def requests_of_the_in_process_path(_model: str, folder: Path) -> Any:
    import torch

    one = adapter(folder / "one", b"a" * 64)
    client = {
        "lmcache.tag.splint": "lora~0~",
        "lmcache.tag.team": "red",
        "lmcache.tag.x@y": "../z%",
        "lmcache.skip_save": False,
    }
    return {
        "plain": _in_process(request()),
        "salt": _in_process(request(cache_salt="tenant")),
        "adapter": _in_process(request(lora_request=one)),
        "client": _in_process(request(transfer=client)),
        "client and adapter": _in_process(request(transfer=client, lora_request=one)),
        "embeddings": _in_process(request(prompt_token_ids=None, prompt_embeds=torch.zeros(300, 128))),
        "reloaded in place": _in_process(
            request(lora_request=adapter(folder / "i", b"i", number=5, load_inplace=True))
        ),
        "pooling": _in_process(_pooling()),
    }


def _pooling() -> Any:
    from vllm.pooling_params import PoolingParams
    from vllm.v1.request import Request

    return Request("request", [5] * 300, None, PoolingParams(), cache_salt="tenant")


def time_of_key_making(model: str, _folder: Path) -> Any:
    """Seconds for the keys of a prompt of 8,192 tokens: tracker, IPC key, object keys; in-process: hashes and keys.

    ``stock`` takes the patches' targets as they were before.
    """
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
    from lmcache.v1.distributed.api import ipc_key_to_object_keys
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

    engine, asked = Engine(model), request(tokens=8192)
    hashes = [bytes([number]) * 32 for number in range(64)]
    patched_init = LMCacheMPRequestTracker.__init__
    names = {"stock": engine.config.model_config.model, "patched": engine.names[0]}
    inits = {"stock": patched_init.__wrapped__, "patched": patched_init}
    databases = {"stock": _database(engine, publish=False), "patched": _database(engine)}

    def multiprocess(kind: str) -> None:
        tracker = LMCacheMPRequestTracker(asked)
        key = IPCCacheServerKey(
            names[kind], 1, 0, tuple(tracker.get_token_ids()), 0, 8192, "request", tracker.cache_salt, None, 1
        )
        ipc_key_to_object_keys(key, hashes, [0])

    def in_process(kind: str) -> None:
        list(databases[kind].process_tokens(list(range(8192))))

    def paired(make: Callable[[str], None]) -> dict[str, float]:
        found: dict[str, list[float]] = {"stock": [], "patched": []}
        for _ in range(300):
            for kind, times in found.items():
                with patch.object(LMCacheMPRequestTracker, "__init__", inits[kind]):
                    began = time.perf_counter()
                    make(kind)
                    times.append(time.perf_counter() - began)
        return {kind: median(times) for kind, times in found.items()}

    return {"multiprocess": paired(multiprocess), "in-process": paired(in_process)}


SCENARIOS = (
    a_worker_that_sees_what_the_engine_core_saw,
    a_worker_on_a_node_with_other_weights,
    a_worker_whose_configuration_was_changed_on_the_way,
    a_worker_whose_engine_core_has_no_patches,
    a_worker_without_an_external_cache,
    a_connector_with_a_profile_publishes_it,
    a_connector_without_a_profile,
    keys_of_every_kv_format,
    keys_of_transfer_modes,
    keys_of_speculative_models,
    a_worker_with_another_transfer_mode_in_its_environment,
    keys_of_blocks_that_are_no_rows,
    bytes_between_block_sizes_on_the_cpu,
    keys_without_a_profile,
    vllms_bundled_connector_in_place_of_lmcaches,
    tensors_that_are_what_the_profile_says,
    tensors_that_differ_from_the_profile,
    layouts_that_vllm_tells_and_does_not_tell,
    prompt_embeddings_are_neither_looked_up_nor_stored,
    adapters_by_content,
    the_longest_key_there_can_be,
    adapters_under_one_path,
    one_adapter_in_engines_that_use_it_otherwise,
    media_in_engines_that_process_them_otherwise,
    weights_exchanged_in_a_running_engine,
    keys_of_the_in_process_path,
    requests_of_the_in_process_path,
    time_of_key_making,
)


def main() -> None:
    """Run every scenario and print the answers, by name."""
    folder = Path(sys.argv[1])
    model = str(make_tiny_model(folder=folder))
    answers = {}
    for scenario in SCENARIOS:
        (folder / scenario.__name__).mkdir()
        answers[scenario.__name__] = scenario(model, folder / scenario.__name__)
    print(json.dumps(answers))


if __name__ == "__main__":
    # Under its import name, so that vLLM finds the classes here by their path.
    import_module("support.kv_identity_seams").main()
