"""A rank that fails or dies takes the others with it, in seconds and by name: processes around a real store."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import pytest
from support import watched_rank
from torch.distributed import TCPStore

from patches.kv_budget.channel import Channel

SIZE = 3
LIMIT_S = 20.0
START_S = 240.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch.distributed"])


@dataclass
class Rank:
    process: ForkServerProcess
    pipe: Connection
    port: int

    def hear(self, timeout_s: float) -> str:
        assert self.pipe.poll(max(0.0, timeout_s)), "the rank said nothing"
        return str(self.pipe.recv())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(number: int, port: int, *, unseen: bool) -> Rank:
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=watched_rank.run, args=(number, SIZE, port, theirs), kwargs={"unseen": unseen})
    process.start()
    theirs.close()
    return Rank(process, ours, port)


@contextmanager
def group(*, unseen: bool = False) -> Iterator[list[Rank]]:
    """All ranks, each of them watching."""
    port = free_port()
    ranks = [start(number, port, unseen=unseen) for number in range(SIZE)]
    try:
        for rank in ranks:
            assert rank.hear(START_S) == "watching"
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()


def last_words(ranks: Sequence[Rank]) -> list[str]:
    """What each rank was told; all must end within the limit, with 1."""
    deadline = time.monotonic() + LIMIT_S
    words = [rank.hear(deadline - time.monotonic()) for rank in ranks]
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        assert rank.process.exitcode == 1
    return words


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_stops_all_others_with_its_name_and_reason(failing: int) -> None:
    with group() as ranks:
        ranks[failing].pipe.send("fail")
        for text in last_words([rank for number, rank in enumerate(ranks) if number != failing]):
            assert text == (
                f"KV budget: DP{failing} (node{failing}, cuda:{failing}) failed while measuring its memory: "
                "RuntimeError: Error in memory profiling. Stopping all 3 ranks."
            )
        ranks[failing].process.join(LIMIT_S)
        assert ranks[failing].process.exitcode == 3


def test_a_killed_rank_is_missed_by_its_neighbour_and_named_to_all() -> None:
    with group() as ranks:
        ranks[2].process.kill()
        for text in last_words(ranks[:2]):
            assert "DP2 (node2, cuda:2) ended without a word (killed?)" in text


@pytest.mark.parametrize("unseen", [False, True], ids=["seen", "unseen"])
def test_the_death_of_dp0_shows_by_the_lost_connection(*, unseen: bool) -> None:
    with group(unseen=unseen) as ranks:
        ranks[0].process.kill()
        assert all("DP0" in text for text in last_words(ranks[1:]))


def test_what_the_neighbour_adds_a_killed_rank_that_none_can_see_stops_nobody() -> None:
    with group(unseen=True) as ranks:
        ranks[2].process.kill()
        ranks[2].process.join()
        time.sleep(1)
        assert [rank.process.exitcode for rank in ranks[:2]] == [None, None]


def test_a_rank_that_others_have_given_up_stops_too_though_it_lives() -> None:
    """As where only the network between two of them is gone."""
    with group() as ranks:
        told = "KV budget: DP2 (node2, cuda:2) has not answered for 11 s."
        store = TCPStore("127.0.0.1", ranks[0].port, None, False)
        Channel(store, 1, SIZE).end(json.dumps({"dp_rank": 2, "failed": told}))
        assert last_words(ranks) == [f"{told} Stopping all 3 ranks."] * SIZE


def test_once_all_are_up_the_watch_is_over() -> None:
    with group() as ranks:
        for rank in ranks:
            rank.pipe.send("up")
        for rank in ranks:
            assert rank.hear(LIMIT_S) == "up"
        time.sleep(0.2)
        ranks[2].process.kill()
        ranks[2].process.join()
        time.sleep(1)
        assert [rank.process.exitcode for rank in ranks[:2]] == [None, None]


def test_as_long_as_one_rank_is_not_up_all_go_on_watching() -> None:
    with group() as ranks:
        for rank in ranks[:2]:
            rank.pipe.send("up")
            assert rank.hear(LIMIT_S) == "up"
        ranks[2].pipe.send("fail")
        assert all("DP2" in text for text in last_words(ranks[:2]))
