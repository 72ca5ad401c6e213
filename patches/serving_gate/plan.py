"""What the gate tells the smoke tests, and what they tell the gate.

The gate writes a :class:`SmokePlan` into the run directory and starts ``python -m entrypoint.smoke``;
that process writes a :class:`Verdict`. Both travel as JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["CONTROL_PREFIX", "MP_CONNECTOR", "SMOKE_HEADER", "CheckResult", "SmokePlan", "Verdict", "is_lmcache"]

SMOKE_HEADER = "x-splint-smoke"
CONTROL_PREFIX = "/splint/control"
MP_CONNECTOR = "LMCacheMPConnector"
SCHEMA = 1


def is_lmcache(connector: str) -> bool:
    """Whether a KV connector of this name is LMCache's."""
    return "lmcache" in connector.lower()


@dataclass(frozen=True)
class SmokePlan:
    """How to reach the server under test, and what it can do.

    Attributes:
        base_url: ``http://127.0.0.1:8000`` with the root path, without ``/v1``.
        secret: Value of the :data:`SMOKE_HEADER` header that passes the closed gate.
        logprobs_mode: What the server returns as log-probabilities, vLLM's ``--logprobs-mode``.
        uds: Path of the Unix socket to connect through, or None for TCP.
        ca_file: Certificate to trust for https, or None.
        api_key: Bearer token of the server, or None.
        model: First served model name.
        runner: vLLM's runner type, ``generate`` or ``pooling``.
        max_model_len: In tokens.
        block_size: KV block size in tokens.
        vocab_size: Token ids below this number may be sent as a prompt.
        prefix_caching: Whether the engine keeps a prefix cache.
        chunked_prefill: Whether the scheduler may cut a prefill into chunks.
        connector: KV connector's name, or None.
        connectors: Its name, and those of the connectors inside it (``MultiConnector``).
        kv_role: ``kv_both``, ``kv_producer``, ``kv_consumer`` or None.
        chunk_tokens: LMCache's chunk size in tokens, or None.
        dp_ranks: The data-parallel ranks whose engines this node starts.
        other_ranks: Those on other nodes that this server sends requests to as well.
        cache_dtype: The engine's ``cache_dtype`` string.
        expected_roster: One entry for each process that must have attested: role and, where it has them, dp_rank
            and rank.
        generated: Tokens that a checked completion asks for; the server may allow fewer than the usual 4.
        extensions: Whether the server has vLLM's additions to the API: token ids in answers, salts of caches.
        features: Names of :class:`~patches.framework.records.Feature` that the server has.
        level: ``full`` or ``quick``.
        timeout_s: Seconds for the whole battery.
    """

    base_url: str
    secret: str
    model: str
    runner: str
    max_model_len: int
    block_size: int
    vocab_size: int
    prefix_caching: bool
    dp_ranks: tuple[int, ...]
    cache_dtype: str
    expected_roster: tuple[dict[str, Any], ...]
    other_ranks: tuple[int, ...] = ()
    generated: int = 4
    chunked_prefill: bool = False
    extensions: bool = True
    features: tuple[str, ...] = ()
    level: str = "full"
    timeout_s: float = 120.0
    connector: str | None = None
    connectors: tuple[str, ...] = ()
    kv_role: str | None = None
    chunk_tokens: int | None = None
    logprobs_mode: str = "raw_logprobs"
    uds: str | None = None
    ca_file: str | None = None
    api_key: str | None = None

    @property
    def served(self) -> tuple[int, ...]:
        """The data-parallel ranks that this server sends requests to, its own first."""
        return (*self.dp_ranks, *self.other_ranks)

    def address(self, rank: int) -> int | None:
        """What the header X-data-parallel-rank must say to reach ``rank``; None where there is no other to reach.

        It counts from the first rank that this server sends requests to.
        """
        return self.served.index(rank) if len(self.served) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SmokePlan:
        """The inverse of :meth:`to_json`."""
        tuples = {
            name: tuple(data[name]) for name in ("dp_ranks", "other_ranks", "expected_roster", "features", "connectors")
        }
        return cls(**{**data, **tuples})


@dataclass(frozen=True)
class CheckResult:
    """One check's outcome. ``status`` is ``passed``, ``failed`` or ``skipped``; a skip names its reason."""

    id: str
    proves: str
    status: str
    seconds: float
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The battery's outcome; ``status`` is ``passed``, ``failed``, or ``skipped`` where it was turned off."""

    status: str
    level: str
    seconds: float
    finished_at: str
    checks: tuple[CheckResult, ...]
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verdict:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "checks": tuple(CheckResult(**check) for check in data["checks"])})
