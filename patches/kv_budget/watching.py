"""While the engines start: who fails tells the others, who dies is missed, and nobody waits for either."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from patches.kv_budget.channel import END, REDUCER, Channel
from patches.kv_budget.lifeline import SILENT_S, Line, hold
from patches.kv_budget.measurement import Hello

__all__ = ["Watch", "end_workers", "stop_engine"]

logger = logging.getLogger("vllm.splint.kv_budget")

UP = "up"
ONE_LOOK_S = 3600.0
WORKERS_END_WITHIN_S = 1.0
EXIT_FAILED = 1
_LOST = {
    Line.ENDED: "ended without a word (killed?)",
    Line.SILENT: f"has not answered for {SILENT_S} s (is its host or network gone?)",
}


class Watch:
    """One rank's eye on its group until all engines are up.

    Threads that sleep until something happens: one waits for the word that ends the start, on a connection of its
    own, and so notices when DP0, which holds the store, has ended; the others hold the lifelines of the next rank and
    of DP0, on whatever host they are. A rank watches two others, so a thousand ranks cost two thousand watches.

    Args:
        channel: The group's words.
        own: This rank.
        on_failure: Called with a sentence when another rank has failed; it is expected to end the process.
        on_end: Called when all engines are up.
    """

    def __init__(
        self, channel: Channel, own: Hello, on_failure: Callable[[str], None], on_end: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._listening = channel.clone()
        self._own = own
        self._on_failure = on_failure
        self._on_end = on_end
        self._done = threading.Event()
        self._stopping = threading.Lock()
        self.stage = "loading the model"

    def start(self, others: Iterable[Hello]) -> None:
        """Begin to watch: the word that ends the start, and the lifelines of ``others``."""
        threading.Thread(target=self._listen, name="splint-kv-budget", daemon=True).start()
        for other in others:
            threading.Thread(target=self._mind, args=(other,), name=f"splint-kv-dp{other.dp_rank}", daemon=True).start()

    def _listen(self) -> None:
        try:
            text = None
            while text is None and not self._done.is_set():
                text = self._listening.wait_for_end(ONE_LOOK_S)
        except ConnectionError as error:
            if not self._done.is_set():
                self._stop(str(error))
            return
        self._ended(text)

    def _ended(self, text: str | None) -> None:
        end: dict[str, Any] = json.loads(text) if text else {UP: True}
        if UP in end or self._done.is_set():
            self._done.set()
            self._on_end()
            return
        self._listening.heard(END, but=end["dp_rank"])
        self._stop(self._for_all(end["failed"]))

    def _for_all(self, what: str) -> str:
        return f"{what} Stopping all {self._channel.size} ranks."

    def _stop(self, reason: str) -> None:
        """Once: two threads may find out at the same time."""
        if self._stopping.acquire(blocking=False):
            self._on_failure(reason)

    def _mind(self, other: Hello) -> None:
        line = hold(other.lifeline)
        if line is Line.UNREACHED or self._done.is_set():
            return
        if other.dp_rank == REDUCER:
            self._mind_reducer(other, line)
            return
        try:
            self._say_failed(self._channel.clone(), other, _LOST[line])
        except RuntimeError as error:
            logger.debug("the store is gone: %s", error)

    def _mind_reducer(self, reducer: Hello, line: Line) -> None:
        """The store is where DP0 is: its end shows there, its silence nowhere else. Nobody can be told any more."""
        if line is Line.SILENT:
            self._stop(self._for_all(f"KV budget: {reducer.name} {_LOST[line]}."))

    def failed(self, reason: str) -> None:
        """Tell the others why this rank stops."""
        if self._done.is_set():
            return
        self._done.set()
        try:
            self._say_failed(self._channel, self._own, f"failed while {self.stage}: {reason}")
            self._channel.heard(END, but=self._own.dp_rank)
        except RuntimeError as error:
            logger.warning("KV budget: could not tell the other ranks: %s", str(error).splitlines()[0])

    def _say_failed(self, channel: Channel, rank: Hello, what: str) -> None:
        word = {"dp_rank": rank.dp_rank, "failed": f"KV budget: {rank.name} {what}."}
        channel.end(json.dumps(word))

    def up(self) -> None:
        """This engine has started; the last one ends everybody's watch."""
        if self._channel.count("up") == self._channel.size:
            self._channel.end(json.dumps({UP: True}))


def stop_engine(reason: str) -> Any:
    """End this engine core at once: its main thread may be waiting in a collective that nobody will complete."""
    logger.critical(reason)
    for handler in logging.getLogger("vllm").handlers:
        handler.flush()
    end_workers()
    os._exit(EXIT_FAILED)


def end_workers() -> None:
    """End this engine core's workers within a second or so; vLLM alone gives each of its steps several."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = time.monotonic() + WORKERS_END_WITHIN_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
