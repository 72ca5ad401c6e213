"""LMCache: what can't work, what can be wrong, what to look at."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from entrypoint.doctor.reading import MULTI_PROCESS
from entrypoint.doctor.rule import NOTE, REFUSE, WARN, Rule
from patches.framework.libraries import in_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from entrypoint.doctor.reading import Reading

__all__ = ["RULES", "server_addresses"]

TOPIC = "LMCache"
CONNECT_S = 1.0
DEFAULT_PORT = 5555
_LOSSY = ("cachegen", "fp8", "turboquant", "kivi", "asym")
_STORES = {
    "lm": "one connection is shared without a lock: bytes of one answer end up in another",
    "fs": "files are taken whatever their size, temporary files collide between processes, int8 is never stored",
    "redis": "what is stored is believed to have the expected shape, int8 is never stored",
    "resp": "a read that failed counts as a hit",
}


def _packed(reading: Reading) -> str | None:
    return "LMCacheConnectorV1" if reading.in_process and not reading.model.latent and not reading.on_cpu else None


def _hybrid(reading: Reading) -> str | None:
    return "LMCacheConnectorV1, a hybrid model" if reading.in_process and reading.model.hybrid else None


def _sparse(reading: Reading) -> str | None:
    return "LMCacheConnectorV1, sparse latent attention" if reading.in_process and reading.model.sparse else None


def _in_process_cpu(reading: Reading) -> str | None:
    return "LMCacheConnectorV1 on the CPU" if reading.in_process and reading.on_cpu else None


def _hybrid_cpu(reading: Reading) -> str | None:
    multi = reading.lmcache == MULTI_PROCESS and reading.on_cpu and reading.model.hybrid
    return "LMCacheMPConnector on the CPU, a hybrid model" if multi else None


def _packed_latent(reading: Reading) -> str | None:
    packed = reading.in_process and reading.kv_dtype == "fp8_ds_mla"
    return f"LMCacheConnectorV1, KV dtype {reading.kv_dtype}" if packed else None


def _lossy(reading: Reading) -> str | None:
    serde = reading.lmcache_setting("remote_serde")
    lossy = reading.in_process and reading.quantised_kv and serde.startswith(_LOSSY)
    return f"remote_serde {serde}, a quantised KV cache" if lossy else None


def _blending(reading: Reading) -> str | None:
    on = reading.in_process and reading.lmcache_setting("enable_blending").lower() in ("true", "1", "yes")
    return "enable_blending" if on else None


def _same_bytes(reading: Reading) -> str | None:
    return f"{reading.lmcache}, a quantised KV cache" if reading.lmcache and reading.quantised_kv else None


def _no_dtype_in_key(reading: Reading) -> str | None:
    return reading.lmcache if reading.lmcache == MULTI_PROCESS else None


def _adapters(reading: Reading) -> str | None:
    return f"{reading.lmcache}, --enable-lora" if reading.lmcache and reading.on("enable_lora") else None


def _context_parallel(reading: Reading) -> str | None:
    size = reading.number("decode_context_parallel_size", 1)
    return f"{reading.lmcache}, decode context parallel {size}" if reading.lmcache and size > 1 else None


def _store(reading: Reading) -> str | None:
    scheme = reading.lmcache_setting("remote_url").partition("://")[0]
    return f"remote_url {scheme}://: {_STORES[scheme]}" if reading.in_process and scheme in _STORES else None


def _disk(reading: Reading) -> str | None:
    folder = reading.lmcache_setting("local_disk")
    several = reading.dp > 1 and reading.in_process and folder not in ("", "None")
    return f"local_disk {folder}, data parallel {reading.dp}" if several else None


def _load_failure(reading: Reading) -> str | None:
    given = reading.transfer.get("kv_load_failure_policy")
    if reading.connector is None or given == "recompute":
        return None
    return f"kv_load_failure_policy {given}" if given else "kv_load_failure_policy not given"


def _explicit_load_failure(reading: Reading) -> str | None:
    return "kv_load_failure_policy fail" if reading.transfer.get("kv_load_failure_policy") == "fail" else None


def server_addresses(reading: Reading) -> list[tuple[str, int]]:
    """Where the LMCache servers of this configuration listen; none where the connector starts its own."""
    return [address for url in _urls(reading) if (address := _address(url)) is not None]


def _over_grpc(reading: Reading) -> str | None:
    return next((url for url in _urls(reading) if url.strip().lower().startswith(("grpc://", "grpc+unix://"))), None)


def _urls(reading: Reading) -> list[str]:
    extra = reading.subject.arguments.extra_config
    if reading.lmcache != MULTI_PROCESS or extra.get("lmcache.mp.autostart"):
        return []
    given = extra.get("lmcache.mp.server_urls")
    return [str(url) for url in (given.split(",") if isinstance(given, str) else given or [_single(extra)])]


def _single(extra: Mapping[str, Any]) -> str:
    return f"{extra.get('lmcache.mp.host', 'localhost')}:{extra.get('lmcache.mp.port', DEFAULT_PORT)}"


def _address(url: str) -> tuple[str, int] | None:
    """Host and port of a TCP address, with or without its scheme."""
    scheme, _, rest = url.strip().rpartition("://")
    host, _, port = rest.rpartition(":")
    return (host.strip("[]"), int(port)) if scheme in ("", "tcp") and port.isdecimal() else None


def _complaint(address: tuple[str, int]) -> str | None:
    try:
        with socket.create_connection(address, CONNECT_S):
            return None
    except OSError as error:
        return f"{address[0]}:{address[1]}: {error.strerror or error}"


def _silent(reading: Reading) -> str | None:
    return "; ".join(filter(None, map(_complaint, server_addresses(reading)))) or None


def _lost_results(reading: Reading) -> str | None:
    return MULTI_PROCESS if reading.lmcache == MULTI_PROCESS else None


def _v1_before_packed(reading: Reading) -> str | None:
    old = reading.subject.vllm is not None and in_range(reading.subject.vllm, "<0.26")
    return "LMCacheConnectorV1" if reading.in_process and old else None


RULES = (
    Rule(
        id="in-process-packed",
        level=REFUSE,
        topic=TOPIC,
        what="The in-process connector copies the KV cache in a layout that vLLM left with 0.26.",
        why="Reads and writes hit foreign blocks: wrong answers for other requests too, without an error.",
        change="LMCacheMPConnector with an lmcache server.",
        found=_packed,
        upstream=("LMCache#4463", "LMCache#4614"),
        vllm=">=0.26",
    ),
    Rule(
        id="in-process-retired",
        level=NOTE,
        topic=TOPIC,
        what="LMCache no longer maintains its in-process connector.",
        why="With vLLM 0.26 and later it corrupts the KV cache: an upgrade of vLLM needs the other connector.",
        change="LMCacheMPConnector with an lmcache server.",
        found=_v1_before_packed,
        upstream=("LMCache#4614",),
    ),
    Rule(
        id="in-process-hybrid",
        level=REFUSE,
        topic=TOPIC,
        what="The in-process connector can't serve models that keep a state beside keys and values.",
        why="The start ends with 'failed to convert the KV cache specs to one unified type'.",
        change="vLLM 0.22.1 or later with LMCacheMPConnector and LMCache 0.5.6.",
        found=_hybrid,
        upstream=("vllm#42911", "LMCache#3106"),
    ),
    Rule(
        id="in-process-sparse",
        level=REFUSE,
        topic=TOPIC,
        what="The in-process connector knows one cache a layer; sparse latent attention has two.",
        why="The start ends with an error of shapes ('(99,) into (78,)'); leaving the indexer out gives garbage.",
        change="LMCacheMPConnector with an lmcache server.",
        found=_sparse,
        upstream=("LMCache#5002",),
    ),
    Rule(
        id="in-process-packed-latent",
        level=REFUSE,
        topic=TOPIC,
        what="The in-process connector takes rows of 656 bytes for rows of 576.",
        why="Nearly every byte that it stores or loads is another one's.",
        change="LMCacheMPConnector, or SPLINT_KV_DTYPE=model.",
        found=_packed_latent,
    ),
    Rule(
        id="in-process-cpu",
        level=REFUSE,
        topic=TOPIC,
        what="There is no in-process connector for the CPU.",
        why="LMCache logs 'No supported cpu connector found', goes on, and caches nothing.",
        change="LMCacheMPConnector with an lmcache server (--supported-transfer-mode auto).",
        found=_in_process_cpu,
    ),
    Rule(
        id="engine-driven-hybrid",
        level=REFUSE,
        topic=TOPIC,
        what="On the CPU the worker copies itself (engine_driven), and that knows one group of layers only.",
        why="Models that keep a state beside keys and values are refused when the engine starts.",
        change="Serve them on the CPU without LMCache.",
        found=_hybrid_cpu,
        upstream=("LMCache#4071",),
    ),
    Rule(
        id="lossy-serde",
        level=REFUSE,
        topic=TOPIC,
        what="A lossy compression for floating-point numbers over a cache that holds codes.",
        why="It compresses the codes as if they were numbers: 208 of 256 come back as others.",
        change="remote_serde: naive.",
        found=_lossy,
        upstream=("LMCache#4064",),
    ),
    Rule(
        id="blending",
        level=REFUSE,
        topic=TOPIC,
        what="CacheBlend in the in-process connector imports modules of vLLM that are gone.",
        why="The engine does not start, or goes on without blending.",
        change="Leave enable_blending out.",
        found=_blending,
        upstream=("LMCache#4476",),
    ),
    Rule(
        id="same-bytes",
        level=WARN,
        topic=TOPIC,
        what="All quantised KV dtypes look alike to LMCache: bytes.",
        why="A store that outlives a change of the KV dtype is read in the new one: wrong answers, no error.",
        change="Empty every tier when KV dtype, model revision or vLLM's release changes; one store for each dtype.",
        found=_same_bytes,
        patch="lmcache_identity",
    ),
    Rule(
        id="no-dtype-in-key",
        level=WARN,
        topic=TOPIC,
        what="The keys of the LMCache server name model and ranks, but neither dtype nor layout.",
        why="Two servers of one model with different KV dtypes, or a store kept over an upgrade, share entries.",
        change="One lmcache server (and one store) for each KV dtype and release of vLLM.",
        found=_no_dtype_in_key,
        patch="lmcache_identity",
    ),
    Rule(
        id="adapters-in-no-key",
        level=REFUSE,
        topic=TOPIC,
        what="LoRA adapters are not in LMCache's keys.",
        why="The KV of one adapter is loaded for another: wrong answers, no error.",
        change="Serve adapters without LMCache, or each adapter as a server of its own with its own store.",
        found=_adapters,
        patch="lmcache_identity",
        upstream=("vllm#44250", "LMCache#2961"),
    ),
    Rule(
        id="context-parallel-in-no-key",
        level=REFUSE,
        topic=TOPIC,
        what="Before 0.5.5 LMCache's keys do not tell context-parallel layouts apart.",
        why="Tokens that are interleaved in one way are read in another.",
        change="LMCache 0.5.5 or later.",
        found=_context_parallel,
        lmcache="<0.5.5",
    ),
    Rule(
        id="failed-loads-count",
        level=REFUSE,
        topic=TOPIC,
        what="A load that failed is reported as finished.",
        why="The request is answered from whatever was in those blocks.",
        change="LMCache 0.5.5 or later.",
        found=_lost_results,
        upstream=("LMCache#3388", "LMCache#4600"),
        lmcache=">=0.4,<0.5.5",
    ),
    Rule(
        id="store",
        level=WARN,
        topic=TOPIC,
        what="The remote store has known faults.",
        why="They end in misses at best, in foreign bytes at worst.",
        change="Rule it out first: unset remote_url and compare. Then prefer the lmcache server's own tiers.",
        found=_store,
        patch="lmcache_admission_in_process",
        upstream=("LMCache#2517", "LMCache#4991"),
    ),
    Rule(
        id="disk-shared",
        level=WARN,
        topic=TOPIC,
        what="Engines that share a local_disk folder overwrite each other's files: no name of an engine is in them.",
        why="63 % of the bytes that one reads back were the other's, in a trial with unequal rows.",
        change="A folder for each engine, or the lmcache server.",
        found=_disk,
        patch="lmcache_admission_in_process",
    ),
    Rule(
        id="load-failure-fails",
        level=WARN,
        topic=TOPIC,
        what="vLLM fails a request whose cached KV can't be loaded.",
        why="An entry that was evicted in between costs an answer, though it could be computed.",
        change='"kv_load_failure_policy": "recompute" in --kv-transfer-config.',
        found=lambda reading: None if _explicit_load_failure(reading) else _load_failure(reading),
        patch="kv_load_recompute",
    ),
    Rule(
        id="load-failure-asked-for",
        level=WARN,
        topic=TOPIC,
        what="The configuration asks for requests to fail whose cached KV can't be loaded.",
        why="An entry that was evicted in between costs an answer, though it could be computed.",
        change="Leave kv_load_failure_policy out, or say recompute.",
        found=_explicit_load_failure,
    ),
    Rule(
        id="server-over-grpc",
        level=REFUSE,
        topic=TOPIC,
        what="An LMCache server that is reached over gRPC; the engine refuses it.",
        why="gRPC clients do not show that a server is gone: look-ups on a paused or dead one waited 8 to 11 s.",
        change="Start it with --transport zmq (its default) and name it with tcp:// in --kv-transfer-config.",
        found=_over_grpc,
    ),
    Rule(
        id="server-silent",
        level=WARN,
        topic=TOPIC,
        what="Nobody listens where the LMCache server should.",
        why="The engine waits SPLINT_LMCACHE_START_TIMEOUT_S seconds for it and then refuses to start.",
        change="Start it first (lmcache server --supported-transfer-mode auto), or correct lmcache.mp.host and .port.",
        found=_silent,
    ),
)
