"""Processes that share a cache compute the same keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, DoesNotApplyError, Evidence

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]

VARIABLE = "PYTHONHASHSEED"


def applies(subject: Subject) -> str | None:
    """Without a connector no key leaves the process."""
    return None if subject.arguments.transfer_config or subject.lmcache_connector else "no KV connector"


def run(subject: Subject) -> Evidence:
    text = subject.environ.get(VARIABLE)
    if text is None and subject.thorough:
        raise DoesNotApplyError(f"splint serve sets {VARIABLE}; for plain vllm serve set it to 0 everywhere yourself")
    if text is None or not text.isdecimal():
        raise CheckFailedError(
            f"{VARIABLE} {'not set' if text is None else repr(text)}: each process hashes in its own way",
            "one number for all servers that share the cache",
            f"Set {VARIABLE}=0 everywhere (splint serve does, where it is not set).",
        )
    return {VARIABLE: text}


CHECK = Check("hash_seed", "Processes that share a cache compute the same keys.", REFUSE, 5.0, applies, run)
