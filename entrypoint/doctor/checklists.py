"""The two checklists that people work through by hand, answered for this configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from entrypoint.doctor.rules import RULES, kv_startup
from entrypoint.doctor.rules.lmcache import server_addresses
from entrypoint.preflight.checks.releases import use_of
from entrypoint.preflight.pairs import judge, remedy
from patches.framework.kv_dtype import AUTO, MODEL, SETTING

if TYPE_CHECKING:
    from collections.abc import Callable

    from entrypoint.doctor.reading import Reading

__all__ = ["CHECKLISTS", "Question"]


@dataclass(frozen=True)
class Question:
    """One line of a checklist; ``answer`` says what holds for a configuration."""

    id: str
    text: str
    answer: Callable[[Reading], str]


def _splits(reading: Reading) -> str:
    pinned = [name for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes") if reading.number(name)]
    agreed = reading.moe and reading.dp > 1 and "kv_budget" in reading.patches
    pools = "one budget that all agree on" if agreed else "each with a pool of its own"
    ranks = f"{reading.dp} data-parallel rank(s), {pools}"
    view = f"; expert parallelism over {reading.moe_ranks} ranks sees the same blocks" if reading.ep else ""
    split = f"; tensor and pipeline parallelism ({reading.tp} x {reading.pp}) cut heads and layers inside an engine"
    if pinned:
        return f"Pinned by --{pinned[0].replace('_', '-')}, the same for every rank. {ranks}{view}{split}."
    return f"No: {ranks}{view}{split}."


def _blocks(reading: Reading) -> str:
    given = reading.number("block_size")
    size = (
        f"{given} tokens on every rank (--block-size)"
        if given
        else "chosen by the attention back end, alike on all ranks"
    )
    hybrid = "; pages of state and attention layers are made equal by padding" if reading.model.hybrid else ""
    cache = "; LMCache's chunk must be a multiple of it" if reading.lmcache else ""
    return f"{size[0].upper()}{size[1:]}{hybrid}{cache}."


def _heads(reading: Reading) -> str:
    heads = reading.model.kv_heads
    if heads is None:
        return f"Yes: only tensor parallelism ({reading.tp}) divides them; the model's number is not known here."
    kind = "one latent head" if reading.model.latent else f"{heads} KV head(s)"
    each = max(heads // reading.tp, 1)
    copies = f", {reading.tp // heads} copies of each" if reading.tp > heads else ""
    return f"Yes: only tensor parallelism divides them: {kind} over {reading.tp} rank(s), {each} a rank{copies}."


def _fallback(reading: Reading) -> str:
    if not reading.moe:
        return (
            "Nothing: no experts."
            if reading.model.known
            else "Unknown: the model's configuration is not on this machine."
        )
    if reading.ep:
        return f"Nothing: {reading.model.experts or 'the'} experts are spread whole over {reading.moe_ranks} rank(s)."
    if reading.moe_ranks == 1:
        return "Nothing: one rank."
    return f"The experts: each is cut in {reading.moe_ranks} slices, because --enable-expert-parallel is not given."


def _faults(reading: Reading) -> str:
    known = [rule for rule in RULES if rule.topic == kv_startup.TOPIC and rule.vllm and rule.of_these_releases(reading)]
    named = [f"{rule.id}{' (held)' if rule.patch in reading.patches else ''}" for rule in known]
    return f"vLLM {reading.subject.vllm}: {', '.join(named) or 'none that is its own'}."


def _real_dtype(reading: Reading) -> str:
    own = reading.value("dtype")
    model = own if own and own != AUTO else reading.model.dtype or "the model's"
    declared = reading.model.declared_kv_quantisation
    if reading.kv_dtype == MODEL or (reading.kv_dtype == AUTO and not declared):
        return f"{model}: {reading.kv_dtype}, the model's own."
    if reading.kv_dtype == AUTO:
        return f"Quantised, as the checkpoint declares ({declared}); LMCache sees bytes."
    seen = "; LMCache sees bytes" if reading.quantised_kv else ""
    return f"{reading.kv_dtype}, asked for by --kv-cache-dtype or {SETTING}{seen}."


def _pair(reading: Reading) -> str:
    use = use_of(reading.subject)
    named = f"vLLM {reading.subject.vllm} with LMCache {reading.subject.lmcache}"
    bad = judge(use) if use else []
    return f"No: {named}: {bad[0]}. {remedy(use)}" if use and bad else f"Yes: {named}."


def _path(reading: Reading) -> str:
    if reading.lmcache is None:
        return "None."
    if reading.in_process:
        return "In process (LMCacheConnectorV1): no longer maintained upstream."
    places = ", ".join(f"{host}:{port}" for host, port in server_addresses(reading))
    return f"Server (LMCacheMPConnector) at {places or 'an address of its own choice'}."


def _first_aid(reading: Reading) -> str:
    if reading.quantised_kv:
        return f"{SETTING}=model: the model's own dtype everywhere; then compare answers."
    return "Nothing to fall back to: the KV cache is in the model's own dtype."


def _back_end(reading: Reading) -> str:
    if reading.lmcache is None:
        return "Ruled out: no LMCache."
    if not reading.in_process:
        return "Only the server knows its tiers: start it without any L2 (--l1-size-gb alone) to rule them out."
    tiers = {name: reading.lmcache_setting(name) for name in ("local_disk", "remote_url")}
    named = [f"{name} {value}" for name, value in tiers.items() if value not in ("", "None")]
    return f"In: {', '.join(named)}. Unset to rule out." if named else "Ruled out: memory of the engine only."


CHECKLISTS: dict[str, tuple[Question, ...]] = {
    "EP/DP": (
        Question("budget", "Does anything but data parallelism split the KV budget?", _splits),
        Question("block-size", "Is the block size uniform?", _blocks),
        Question("heads", "Are heads independent of expert parallelism?", _heads),
        Question("fallback", "What falls back to pure tensor parallelism?", _fallback),
        Question("faults", "Which KV start-up faults does this release have?", _faults),
    ),
    "LMCache": (
        Question("dtype", "What is the KV cache's real dtype?", _real_dtype),
        Question("releases", "Do the releases match?", _pair),
        Question("path", "Which connector?", _path),
        Question("first-aid", "What is the first aid?", _first_aid),
        Question("back-end", "Is the storage back end ruled in or out?", _back_end),
    ),
}
