"""While the engines start: who fails tells the others, who dies is missed, and nobody waits for either."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from patches.kv_budget.channel import END, Channel
from patches.kv_budget.lifeline import hold
from patches.kv_budget.measurement import Hello

__all__ = ["Watch", "end_workers", "stop_engine"]

logger = logging.getLogger("vllm.splint.kv_budget")

UP = "up"
ONE_LOOK_S = 3600.0
WORKERS_END_WITHIN_S = 1.0
EXIT_FAILED = 1


class Watch:
    """One rank's eye on its group until all engines are up.

    Two threads that sleep until something happens: one waits for the word that ends the start, on a connection of its
    own, and so notices when DP0, which holds the store, is gone; the other holds the lifeline of the next rank, on
    whatever host it is. A rank watches one other, so a thousand ranks cost a thousand watches.

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
        self.stage = "loading the model"

    def start(self, neighbour: Hello | None) -> None:
        """Begin to watch."""
        threading.Thread(target=self._listen, name="splint-kv-budget", daemon=True).start()
        if neighbour is not None:
            threading.Thread(target=self._mind, args=(neighbour,), name="splint-kv-neighbour", daemon=True).start()

    def _listen(self) -> None:
        try:
            text = None
            while text is None and not self._done.is_set():
                text = self._listening.wait_for_end(ONE_LOOK_S)
        except ConnectionError as error:
            if not self._done.is_set():
                self._on_failure(str(error))
            return
        self._ended(text)

    def _ended(self, text: str | None) -> None:
        end = json.loads(text) if text else {UP: True}
        if UP in end or self._done.is_set() or end["dp_rank"] == self._own.dp_rank:
            self._done.set()
            self._on_end()
            return
        self._listening.heard(END, but=end["dp_rank"])
        self._on_failure(f"{end['failed']} Stopping all {self._channel.size} ranks.")

    def _mind(self, neighbour: Hello) -> None:
        """The listening thread hears of a death like every other rank; of DP0's, which holds the store, by itself."""
        if not hold(neighbour.lifeline) or self._done.is_set():
            return
        try:
            self._say_failed(self._channel.clone(), neighbour, "ended without a word (killed?)")
        except RuntimeError as error:
            logger.debug("the store is gone: %s", error)

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
