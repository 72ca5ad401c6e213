"""One real engine whose KV cache and connector are sabotaged one after the other, probed each time.

``python -m support.kv_probe_engine MODEL_FOLDER KV_DTYPE CONNECTOR_CONFIG`` prints one JSON object: the answers of each
probe by the name of the sabotage. CONNECTOR_CONFIG is empty for an engine without a connector.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from patches.framework import rundir


def _layers(worker: Any) -> list[Any]:
    config = worker.vllm_config.compilation_config.static_forward_context
    return [config[name] for name in worker.model_runner.kv_cache_config.kv_cache_groups[0].layer_names]


def _keep(worker: Any, owner: Any, name: str, replacement: Any) -> None:
    """Replace an attribute until :func:`restore`."""
    kept = vars(worker).setdefault("kept", [])
    kept.append((owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)


def restore(worker: Any) -> None:
    for owner, name, value in reversed(vars(worker).pop("kept", [])):
        setattr(owner, name, value)


def two_layers_share_memory(worker: Any) -> None:
    first, second = _layers(worker)[:2]
    _keep(worker, second, "kv_cache", first.kv_cache)


def one_bit_flips_on_the_way_back(worker: Any) -> None:
    import torch
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    context = get_kv_transfer_group().worker_adapter.transfer_ctx
    load = context.submit_retrieve
    layer = _layers(worker)[-1]

    def damaged(request_id: str, key: Any, kv_caches: Any, block_ids: Any, *args: Any, **kwargs: Any) -> Any:
        future = load(request_id, key, kv_caches, block_ids, *args, **kwargs)
        bits = layer.kv_cache.view({1: torch.uint8, 2: torch.int16}[layer.kv_cache.element_size()])
        bits[block_ids[0][0], 0, 0, 0] ^= 1
        return future

    _keep(worker, context, "submit_retrieve", damaged)


def nothing_comes_back(worker: Any) -> None:
    """The connector says that it has loaded, and has not."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    context = get_kv_transfer_group().worker_adapter.transfer_ctx
    load = context.submit_retrieve
    empty: Callable[..., Any] = lambda request_id, key, caches, blocks, *args, **kwargs: load(  # noqa: E731
        request_id, key, {name: cache.clone() for name, cache in caches.items()}, blocks, *args, **kwargs
    )
    _keep(worker, context, "submit_retrieve", empty)


def another_format_is_read(worker: Any) -> None:
    """Reads take the cache for another format than writes left in it."""
    import torch

    impl = _layers(worker)[0].impl
    forward = impl.forward

    def misread(*args: Any, **kwargs: Any) -> Any:
        cache = args[4]
        other = cache.view(torch.float16).to(cache.dtype) if cache.dtype == torch.bfloat16 else cache ^ 4
        return forward(*args[:4], other, *args[5:], **kwargs)

    _keep(worker, impl, "forward", misread)


def values_are_written_one_token_late(worker: Any) -> None:
    impl = _layers(worker)[0].impl
    write = impl.do_kv_cache_update
    _keep(
        worker, impl, "do_kv_cache_update",
        lambda layer, key, value, cache, slots: write(layer, key, value.roll(1, 0), cache, slots),
    )  # fmt: skip


def a_trial_breaks_off(worker: Any) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise AttributeError("no such field")

    _keep(worker, _layers(worker)[0].impl, "forward", broken)


SABOTAGES: dict[str, tuple[str, bool]] = {
    "two_layers_share_memory": ("kv_round_trip", False),
    "one_bit_flips_on_the_way_back": ("kv_round_trip", True),
    "nothing_comes_back": ("kv_round_trip", True),
    "another_format_is_read": ("attention", False),
    "values_are_written_one_token_late": ("attention", False),
    "a_trial_breaks_off": ("attention", False),
}
"""Which probe each is for, and whether it needs a connector."""


def main(model: str, kv_dtype: str, connector: str) -> dict[str, Any]:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    run = rundir.create()
    os.environ[rundir.ENV] = str(run)
    llm = LLM(
        model, dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=4, kv_cache_dtype=kv_dtype,
        kv_transfer_config=KVTransferConfig(**json.loads(connector)) if connector else None,
    )  # fmt: skip
    core: Any = llm.llm_engine.engine_core

    def probe(name: str) -> Any:
        return core.call_utility("splint_probe", name)

    rundir.write_json(run / rundir.PHASE, {"phase": "smoke"})
    found = {"none": {name: probe(name) for name in ("kv_round_trip", "attention")}}
    for sabotage, (name, needs_connector) in SABOTAGES.items():
        if needs_connector and not connector:
            continue
        llm.collective_rpc(globals()[sabotage])
        found[sabotage] = {name: probe(name)}
        llm.collective_rpc(restore)
    found["after"] = {name: probe(name) for name in ("kv_round_trip", "attention")}
    rundir.write_json(run / rundir.PHASE, {"phase": "serving"})
    found["open"] = {"kv_round_trip": _refusal(lambda: probe("kv_round_trip"))}
    return found


def _refusal(call: Callable[[], Any]) -> str:
    """What the engine says to a call that it refuses."""
    try:
        return f"answered: {call()}"
    except Exception as error:  # noqa: BLE001 - vLLM's client raises no narrower type
        return str(error)


if __name__ == "__main__":
    print("found", json.dumps(main(*sys.argv[1:4])), flush=True)
