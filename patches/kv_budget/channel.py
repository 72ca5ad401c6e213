"""Words between DP ranks through the store of their group: keys and values, never a collective.

A collective that one rank misses hangs the others, or is taken for the next one; a key is there or not. Every word
costs its rank one request, so the whole exchange is linear in ranks.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

__all__ = ["END", "REDUCER", "Channel", "SilentRanksError"]

logger = logging.getLogger(__name__)

REDUCER = 0
PREFIX = "splint/kv/"
HEARD_WITHIN_S = 2.0
END = "end"


class SilentRanksError(Exception):
    """Words that did not come in time.

    Attributes:
        ranks: DP ranks that said nothing.
    """

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        super().__init__(ranks)


def _gone(error: Exception) -> ConnectionError:
    why = str(error).splitlines()[0]
    return ConnectionError(f"KV budget: DP{REDUCER}, which holds the store of the group, is gone ({why})")


class Channel:
    """One rank's access to the words of its group.

    Args:
        store: A ``torch.distributed`` store that all ranks share. Its client is locked while one thread waits.
        rank: Own DP rank.
        size: DP ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size

    def clone(self) -> Channel:
        """Another connection, for another thread. Costs a reverse name look-up, which can take seconds."""
        return Channel(self._store.clone(), self.rank, self.size)

    def say(self, topic: str, text: str) -> None:
        """Leave this rank's word on ``topic``."""
        self._store.set(f"{PREFIX}{topic}/{self.rank}", text)

    def hear(self, topic: str, rank: int, timeout_s: float) -> str:
        """Wait for another rank's word.

        Raises:
            SilentRanksError: it did not come in ``timeout_s`` seconds.
            ConnectionError: the store, which lives in DP0, is gone.
        """
        (text,) = self._wait([f"{PREFIX}{topic}/{rank}"], [rank], timeout_s)
        return text

    def gather(self, topic: str, timeout_s: float) -> list[str]:
        """Wait for every rank's word, in rank order. Raises like :meth:`hear`."""
        ranks = list(range(self.size))
        return self._wait([f"{PREFIX}{topic}/{rank}" for rank in ranks], ranks, timeout_s)

    def _wait(self, keys: list[str], ranks: list[int], timeout_s: float) -> list[str]:
        from torch.distributed import DistNetworkError

        try:
            self._arrive(keys, ranks, timeout_s)
            return [value.decode() for value in self._store.multi_get(keys)]
        except DistNetworkError as error:
            raise _gone(error) from error

    def _arrive(self, keys: list[str], ranks: list[int], timeout_s: float) -> None:
        from torch.distributed import DistStoreError

        deadline = time.monotonic() + timeout_s
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except DistStoreError as error:
            if time.monotonic() < deadline - 1:
                raise _gone(error) from error
            # None where the last word has come since.
            if silent := [rank for key, rank in zip(keys, ranks, strict=True) if not self._there(key)]:
                raise SilentRanksError(silent) from None

    def _there(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def end(self, text: str) -> str:
        """Say how the start ended, for all; the first word stands and is returned."""
        return str(self._store.compare_set(f"{PREFIX}{END}", "", text).decode())

    def wait_for_end(self, timeout_s: float) -> str | None:
        """How the start ended, or None where it had not after ``timeout_s`` seconds. Raises ConnectionError."""
        try:
            (text,) = self._wait([f"{PREFIX}{END}"], [0], timeout_s)
        except SilentRanksError:
            return None
        return text

    def count(self, topic: str) -> int:
        """Add this rank to a count, and return it."""
        return int(self._store.add(f"{PREFIX}{topic}", 1))

    def heard(self, what: str, but: int | None = None) -> None:
        """Say that this rank knows of ``what``. DP0, which holds the store, stays until all do, at most 2 s.

        Args:
            what: A topic, or how the start ended.
            but: A rank that is not waited for: it is the one that failed.
        """
        topic = f"heard/{what}"
        try:
            self.say(topic, "")
            if self.rank == REDUCER:
                ranks = [rank for rank in range(self.size) if rank != but]
                self._wait([f"{PREFIX}{topic}/{rank}" for rank in ranks], ranks, HEARD_WITHIN_S)
        except SilentRanksError as error:
            logger.debug("%s did not say that they know", error.ranks)
        except (ConnectionError, RuntimeError) as error:
            logger.debug("the store is gone: %s", error)
