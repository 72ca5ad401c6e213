"""While the engines start: who fails tells the others, who dies is missed, and nobody waits for either."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from patches.framework.roster import start_time
from patches.kv_budget.channel import Channel
from patches.kv_budget.measurement import Hello

__all__ = ["Watch", "end_workers", "pid_namespace", "stop_engine"]

logger = logging.getLogger(__name__)

UP = "up"
ONE_LOOK_S = 3600.0
WORKERS_END_WITHIN_S = 1.0
EXIT_FAILED = 1


def pid_namespace() -> str:
    """Identity of this process's pid namespace on this boot: who has the same one can see this process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


class Watch:
    """One rank's eye on its group until all engines are up.

    Two threads that sleep until something happens: one waits for the word that ends the start, on a connection of its
    own, and so notices when DP0, which holds the store, is gone; the other waits for the end of the next rank's
    process on this host. A rank watches one other, so a thousand ranks cost a thousand watches.

    Args:
        channel: The group's words.
        own: This rank.
        on_failure: Called with a sentence when another rank has failed; it is expected to end the process.
    """

    def __init__(self, channel: Channel, own: Hello, on_failure: Callable[[str], None]) -> None:
        self._channel = channel
        self._listening = channel.clone()
        self._own = own
        self._on_failure = on_failure
        self._done = threading.Event()
        self.stage = "loading the model"

    def start(self, neighbour: Hello | None) -> None:
        """Begin to watch."""
        threading.Thread(target=self._listen, name="splint-kv-budget", daemon=True).start()
        if neighbour is not None and neighbour.pid_namespace == self._own.pid_namespace:
            threading.Thread(target=self._mind, args=(neighbour,), name="splint-kv-neighbour", daemon=True).start()

    def _listen(self) -> None:
        try:
            text = None
            while text is None and not self._done.is_set():
                text = self._listening.wait_for_end(ONE_LOOK_S)
        except ConnectionError as error:
            if not self._done.is_set():
                self._on_failure(f"KV budget: DP0, which holds the store of the group, is gone ({error})")
            return
        self._ended(text)

    def _ended(self, text: str | None) -> None:
        end = json.loads(text) if text else {UP: True}
        if UP in end or self._done.is_set() or end["dp_rank"] == self._own.dp_rank:
            self._done.set()
            return
        self._listening.heard()
        self._on_failure(f"{end['failed']} Stopping all {self._channel.size} ranks.")

    def _mind(self, neighbour: Hello) -> None:
        """Wait for the end of a process on this host, by its descriptor: no polling, no reused pid."""
        try:
            descriptor = os.pidfd_open(neighbour.pid)
        except ProcessLookupError:
            descriptor = -1
        if descriptor < 0 or start_time(neighbour.pid) != neighbour.started:
            self._missed(neighbour)
            return
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not self._done.is_set():
            if poll.poll(1000):
                self._missed(neighbour)
                break
        os.close(descriptor)

    def _missed(self, neighbour: Hello) -> None:
        """The listening thread hears of it like every other rank; where DP0 itself is gone, it hears that too."""
        if not self._done.is_set():
            self._say_failed(self._channel.clone(), neighbour, "ended without a word (killed?)")

    def failed(self, reason: str) -> None:
        """Tell the others why this rank stops."""
        if self._done.is_set():
            return
        self._done.set()
        try:
            self._say_failed(self._channel, self._own, f"failed while {self.stage}: {reason}")
            self._channel.heard()
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
