"""Making the smoke plan from what the API server knows about itself."""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from patches.framework import roster, settings
from patches.framework.records import Feature
from patches.framework.selection import selected
from patches.serving_gate.access import api_keys
from patches.serving_gate.expected import expected_roster, local_dp_ranks, served_dp_ranks
from patches.serving_gate.plan import MP_CONNECTOR, SmokePlan

__all__ = ["make_plan"]

ROSTER_PATCH = "process_roster"
PROBE_PATCH = "kv_probe"
GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"


def make_plan(args: Any, config: Any, port: int, run_dir: Path) -> SmokePlan:
    """What the smoke tests are to prove about this server.

    Args:
        args: The API server's parsed arguments.
        config: vLLM's ``VllmConfig``.
        port: The port that the server listens on.
        run_dir: The server's run directory.
    """
    usual = SmokePlan.generated
    local = local_dp_ranks(config.parallel_config)
    patches = selected(settings.get("SPLINT_PATCHES"))
    processes = roster.load(run_dir)
    model, cache, transfer = config.model_config, config.cache_config, config.kv_transfer_config
    return SmokePlan(
        base_url=_base_url(args, port),
        secret=secrets.token_urlsafe(32),
        model=(args.served_model_name or [args.model])[0],
        runner=model.runner_type,
        max_model_len=model.max_model_len,
        block_size=cache.block_size,
        vocab_size=model.get_vocab_size(),
        prefix_caching=bool(cache.enable_prefix_caching),
        chunked_prefill=bool(config.scheduler_config.enable_chunked_prefill),
        connector=transfer.kv_connector if transfer else None,
        connectors=tuple(name for name, _ in _connectors(transfer)),
        kv_role=transfer.kv_role if transfer else None,
        chunk_tokens=_chunk_tokens(processes),
        dp_ranks=local,
        other_ranks=tuple(sorted(set(served_dp_ranks(config.parallel_config)) - set(local))),
        cache_dtype=cache.cache_dtype,
        expected_roster=expected_roster(config) if ROSTER_PATCH in patches else (),
        generated=min(usual, model.get_diff_sampling_param().get("max_tokens") or usual),
        features=tuple(feature.value for feature in _features(config, patches, processes)),
        level=settings.get("SPLINT_SMOKE"),
        timeout_s=settings.get("SPLINT_SMOKE_TIMEOUT_S"),
        logprobs_mode=model.logprobs_mode,
        uds=args.uds,
        ca_file=args.ssl_certfile,
        api_key=next(iter(api_keys(args)), None),
    )


def _features(config: Any, patches: Container[str], processes: Iterable[Mapping[str, Any]]) -> Iterator[Feature]:
    """What decides which seams the smoke tests must have called."""
    parallel, facts = config.parallel_config, [entry["facts"] for entry in processes]
    if PROBE_PATCH in patches and parallel.data_parallel_backend == "mp":
        yield Feature.PROBED
    if (MP_CONNECTOR, "kv_both") in _connectors(config.kv_transfer_config):
        yield Feature.LMCACHE
    if parallel.data_parallel_size > 1 and parallel.enable_expert_parallel and config.model_config.is_moe:
        yield Feature.EXPERT_RANKS
    if parallel.worker_cls == GPU_WORKER and config.model_config.runner_type == "generate":
        yield Feature.PROFILED
        if _measures(config):
            yield Feature.MEASURED
    for mode in (Feature.ENGINE_DRIVEN, Feature.LMCACHE_DRIVEN):
        if any(fact.get("lmcache_transfer") == mode.value for fact in facts):
            yield mode
    if any(fact.get("command") for fact in facts):
        yield Feature.COMMAND
        if parallel._api_process_count == 1:
            yield Feature.ONE_API_SERVER


def _measures(config: Any) -> bool:
    """Whether GPU workers measure their KV cache's size, which nobody has given."""
    from vllm import envs

    given = config.cache_config.kv_cache_memory_bytes or settings.get("SPLINT_KV_BUDGET_RANKS")
    return not given and not envs.VLLM_ENABLE_STARTUP_PLAN


def _connectors(transfer: Any) -> Iterator[tuple[str, str]]:
    """Name and role of the KV connector and of those inside it."""
    if transfer is None or transfer.kv_connector is None:
        return
    yield transfer.kv_connector, transfer.kv_role
    for inside in transfer.kv_connector_extra_config.get("connectors", ()):
        yield inside["kv_connector"], inside.get("kv_role", transfer.kv_role)


_ALL_INTERFACES = (None, "", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


def _base_url(args: Any, port: int) -> str:
    scheme = "https" if args.ssl_certfile else "http"
    host = args.host if args.host not in _ALL_INTERFACES else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{port}{args.root_path or ''}"


def _chunk_tokens(processes: Iterable[Mapping[str, Any]]) -> int | None:
    """LMCache's chunk size in tokens, as the engine cores attested it."""
    told = (entry["facts"].get("lmcache_chunk_tokens") for entry in processes)
    return next((int(tokens) for tokens in told if tokens is not None), None)
