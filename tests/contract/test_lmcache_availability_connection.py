"""The availability patch on LMCache's own classes, against real ``lmcache server`` processes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.servers import free_port

from patches.framework import process, tallies
from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Seam
from patches.lmcache_availability import PATCH, limits
from patches.lmcache_availability.connection import link_of
from patches.lmcache_availability.link import ServerUnavailableError

lmcache = pytest.importorskip("lmcache")
torch = pytest.importorskip("torch")
zmq = pytest.importorskip("zmq")

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning"
    ),  # LMCache's logging
]

CHUNK = 128
BLOCKS = 16
LIMIT_S = PREFETCH_S = 3.0
TRANSFER_S = 1.5
"""Longer than usual: a live server that gets no processor for a second or two is to be waited for, not given up."""
AT_ONCE_S = 1.4
"""Less than any of the limits: what ends within it was not waited for."""
SLACK_S = 15.0
"""What a busy machine may add to a limit. Without the guards it is minutes, or for ever."""
USUAL = ("--chunk-size", str(CHUNK), "--supported-transfer-mode", "auto")


def owner_of(qualname: str) -> tuple[Any, str]:
    target = next(target for target in PATCH.targets if target.qualname == qualname)
    owner: Any = importlib.import_module(target.module)
    *path, attribute = qualname.split(".")
    for name in path:
        owner = getattr(owner, name)
    return owner, attribute


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """Apply the record, unless this environment's start-up hooks have done so."""
    for target in PATCH.targets:
        importlib.import_module(target.module)
    current = process.current()
    if current is not None and current.application.states[PATCH.id].replaced:
        yield
        return
    with pytest.MonkeyPatch.context() as patcher:
        for target in PATCH.targets:
            owner, attribute = owner_of(target.qualname)
            module, _, factory = target.wrapper.partition(":")
            seam = Seam(target.name, vars(owner)[attribute], lambda: None)
            patcher.setattr(owner, attribute, getattr(importlib.import_module(module), factory)(seam))
        yield


@pytest.fixture(scope="module", autouse=True)
def limited() -> Iterator[None]:
    """The limits of this module instead of the usual ones."""
    with pytest.MonkeyPatch.context() as patcher:
        for name, seconds in (("LOOKUP", LIMIT_S), ("PREFETCH", PREFETCH_S), ("TRANSFER", TRANSFER_S)):
            patcher.setenv(f"SPLINT_LMCACHE_{name}_TIMEOUT_S", str(seconds))
        limits.limit_s.cache_clear()
        yield
    limits.limit_s.cache_clear()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Take guards away again, all of them or those that are named."""

    def take(*qualnames: str) -> None:
        for qualname in qualnames or [target.qualname for target in PATCH.targets]:
            owner, attribute = owner_of(qualname)
            monkeypatch.setattr(owner, attribute, vars(owner)[attribute].__wrapped__)

    return take


SERVERS = multiprocessing.get_context("forkserver")
SERVERS.set_forkserver_preload(
    ["lmcache.cli.main", "lmcache.v1.multiprocess.server", "lmcache.v1.multiprocess.http_server"]
)


class Cache:
    """A real ``lmcache server`` on one port, that tests stop, kill and start again.

    It is forked from a process that has imported LMCache already: imports are nearly all of its start-up time.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.flags: tuple[str, ...] = ()
        self.process: Any = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def up(self, *flags: str) -> Cache:
        """Run with these flags, anew where it ran with others; returns when it accepts connections."""
        if self.process is not None and self.process.is_alive() and flags != self.flags:
            self.kill()
        if self.process is None or not self.process.is_alive():
            from lmcache.cli.main import main

            self.flags = flags
            self.process = SERVERS.Process(target=main, args=(self.command(),), daemon=True)
            self.process.start()
            until(self.accepts, 240)
        return self

    def command(self) -> list[str]:
        addresses = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(free_port()),
        ]
        return ["server", *addresses, "--l1-size-gb", "0.1", "--eviction-policy", "LRU", *self.flags]

    def accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stands_still(self) -> bool:
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return all("State:\tT" in (thread / "status").read_text() for thread in threads)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        os.kill(self.process.pid, signal.SIGSTOP)
        until(self.stands_still)
        try:
            yield
        finally:
            if self.process.is_alive():
                os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def running_cache() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    if cache.process is not None and cache.process.is_alive():
        cache.kill()


@pytest.fixture
def cache(running_cache: Cache) -> Cache:
    return running_cache.up(*USUAL)


def strategy() -> Any:
    from lmcache.integration.vllm.vllm_multi_process_adapter import ParallelStrategy

    return ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)


def name_of(mode: str) -> str:
    """The modes lay objects out differently, and the server takes one layout under a name."""
    return "model" if mode == "engine_driven" else f"model of {mode}"


def scheduler_for(url: str, block_tokens: int = CHUNK, mode: str = "engine_driven") -> Any:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPSchedulerAdapter

    return LMCacheMPSchedulerAdapter(
        [url], zmq.Context.instance(), name_of(mode), block_tokens, strategy(), extra_config={}
    )


def worker_for(url: str, mode: str = "engine_driven") -> Any:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter

    extra = {"lmcache.mp.mp_transfer_mode": mode}
    worker = LMCacheMPWorkerAdapter(url, zmq.Context.instance(), name_of(mode), CHUNK, strategy(), extra_config=extra)
    try:
        worker.register_kv_caches(kv_caches(), layout_hints={"kv_layout": "HND"})
    except BaseException:
        worker.shutdown()
        raise
    return worker


def kv_caches() -> dict[str, Any]:
    """Two layers of [blocks, heads, tokens of a block, keys and values], as vLLM's CPU backend lays them out."""
    return {f"layer.{n}": torch.rand(BLOCKS, 2, CHUNK, 32).to(torch.bfloat16) for n in range(2)}


@pytest.fixture
def scheduler(cache: Cache) -> Iterator[Any]:
    adapter = scheduler_for(cache.url)
    yield adapter
    adapter.shutdown()


@pytest.fixture
def worker(cache: Cache) -> Iterator[Any]:
    adapter = worker_for(cache.url)
    yield adapter
    cache.up(*USUAL)
    adapter.shutdown()


def operation(first_token: int, blocks: list[int]) -> Any:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

    count = len(blocks) * CHUNK
    return LoadStoreOp(list(range(first_token, first_token + count)), [blocks], 0, count)


def until(true: Callable[[], Any], limit_s: float = 60.0) -> float:
    """Seconds until ``true()``; fails after the limit."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < limit_s, f"not so after {limit_s} s"
        time.sleep(0.002)
    return time.monotonic() - start


def looked_up(scheduler: Any, request_id: str, limit_s: float = 60.0) -> tuple[int, float]:
    """Tokens that a look-up found, and the seconds it took."""
    found: list[int] = []

    def answered() -> bool:
        result = scheduler.check_lookup_result(request_id)
        if result is not None:
            found.append(result)
        return result is not None

    seconds = until(answered, limit_s)
    return found[0], seconds


def tokens(count: int = 4 * CHUNK, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def gained(before: dict[str, int], what: str) -> int:
    """How much the tallies whose names start with ``what`` have grown."""
    now = tallies.snapshot()
    return sum(count - before.get(name, 0) for name, count in now.items() if name.startswith(what))


def test_lookup_that_a_stopped_server_does_not_answer_is_given_up_in_time(cache: Cache, scheduler: Any) -> None:
    before = tallies.snapshot()
    with cache.stopped():
        scheduler.maybe_submit_lookup_request("silent", tokens())
        found, seconds = looked_up(scheduler, "silent")
        assert found == 0
        assert seconds < LIMIT_S + SLACK_S
        assert not scheduler.is_healthy
        for _ in range(3):  # as the scheduler does while a request waits for blocks
            scheduler.maybe_submit_lookup_request("while away", tokens())
        assert looked_up(scheduler, "while away")[1] < AT_ONCE_S
        scheduler.check_lookup_result("silent")
        assert gained(before, "lmcache_misses lookup_unanswered") == 1
        assert gained(before, "lmcache_misses server_away") == 1
    until(lambda: scheduler.is_healthy)
    scheduler.maybe_submit_lookup_request("after", tokens())
    assert looked_up(scheduler, "after")[1] < LIMIT_S
    assert gained(before, "lmcache_misses") == 2, "no more than those two"
    assert gained(before, "lmcache_outages silent") == 1


def test_lookup_that_ends_with_an_overdue_ping_is_counted_once(cache: Cache, scheduler: Any) -> None:
    before = tallies.snapshot()
    with cache.stopped():
        scheduler.maybe_submit_lookup_request("under way", tokens())
        link_of(scheduler.req_clients[cache.url]).overdue("ping")
        assert scheduler.check_lookup_result("under way") == 0
        assert scheduler.check_lookup_result("under way") == 0
        assert gained(before, "lmcache_misses lookup_unanswered") == 1
        cache.kill()
        until(lambda: gained(before, "lmcache_outages lost"))
    assert gained(before, "lmcache_misses") == 1
    cache.up(*USUAL)


def test_without_the_guard_a_lookup_that_ends_with_an_overdue_ping_is_not_counted(
    cache: Cache, scheduler: Any, bare: Callable[..., None]
) -> None:
    bare("LMCacheMPSchedulerAdapter.check_lookup_result")
    before = tallies.snapshot()
    with cache.stopped():
        scheduler.maybe_submit_lookup_request("under way", tokens())
        link_of(scheduler.req_clients[cache.url]).overdue("ping")
        assert scheduler.check_lookup_result("under way") == 0
        assert gained(before, "lmcache_misses") == 0


@contextmanager
def not_yet(client: Any) -> Iterator[None]:
    """Let a server that answers at once say that it is not done with any look-up, as one with a slow disk does."""
    from lmcache.v1.multiprocess.futures import MessagingFuture

    def unfinished(_: str) -> Any:
        future: Any = MessagingFuture()
        future.set_result(None)
        return future

    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(client, "query_prefetch_status", unfinished)
        yield


def stored(worker: Any, request_id: str, first: int) -> None:
    before = tallies.snapshot()
    worker.submit_store_request(request_id, operation(first, [0, 1, 2, 3]), None)
    until(lambda: worker.get_finished({request_id}) and gained(before, "lmcache_stored_tokens") == 4 * CHUNK)


def test_lookup_that_the_server_does_not_finish_is_given_up_and_its_locks_given_back(
    cache: Cache, scheduler: Any, worker: Any
) -> None:
    before, first = tallies.snapshot(), 70_000
    stored(worker, "stores for slow", first)
    with not_yet(scheduler.req_clients[cache.url]):
        scheduler.maybe_submit_lookup_request("slow", tokens(first=first))
        found, seconds = looked_up(scheduler, "slow")
        assert found == 0
        assert PREFETCH_S <= seconds < PREFETCH_S + SLACK_S
        assert scheduler.is_healthy
        assert scheduler.check_lookup_result("slow") == 0  # as the scheduler does while it waits for blocks
        scheduler.cleanup_lookup_result("slow")
        scheduler.maybe_submit_lookup_request("slow", tokens(first=first))  # the request was preempted
        assert scheduler.check_lookup_result("slow") == 0
        assert gained(before, "lmcache_misses prefetch_unfinished") == 2
        assert scheduler.reset_cache(), "keeps what is locked"
        scheduler.maybe_submit_lookup_request("locked", tokens(first=first))
    assert looked_up(scheduler, "locked")[0] == 4 * CHUNK
    scheduler.free_lookup_locks(tokens(first=first), 0, 4 * CHUNK, "locked")

    def given_back() -> bool:
        scheduler.reset_cache()
        scheduler.cleanup_lookup_result("again")
        scheduler.maybe_submit_lookup_request("again", tokens(first=first))
        found = looked_up(scheduler, "again")[0]
        scheduler.free_lookup_locks(tokens(first=first), 0, found, "again")
        return found == 0

    until(given_back)


def test_lookup_that_is_done_when_the_engine_looks_late_is_a_hit(cache: Cache, scheduler: Any, worker: Any) -> None:
    first = 80_000
    stored(worker, "stores for late", first)
    client = scheduler.req_clients[cache.url]
    with not_yet(client):
        scheduler.maybe_submit_lookup_request("late", tokens(first=first))
        until(lambda: scheduler.check_lookup_result("late") is None and not scheduler._unacked_lookups)
    time.sleep(PREFETCH_S + 0.1)  # a long step
    assert looked_up(scheduler, "late")[0] == 4 * CHUNK
    scheduler.free_lookup_locks(tokens(first=first), 0, 4 * CHUNK, "late")
    scheduler.cleanup_lookup_result("late")
    with not_yet(client):  # after a preemption; it has its whole time again
        scheduler.maybe_submit_lookup_request("late", tokens(first=first))
        until(lambda: scheduler.check_lookup_result("late") is None and not scheduler._unacked_lookups)
        assert scheduler.check_lookup_result("late") is None


def test_without_the_guard_a_lookup_that_the_server_does_not_finish_hangs(
    cache: Cache, scheduler: Any, bare: Callable[..., None]
) -> None:
    bare("LMCacheMPSchedulerAdapter.check_lookup_result")
    with not_yet(scheduler.req_clients[cache.url]):
        scheduler.maybe_submit_lookup_request("hangs", tokens())
        with pytest.raises(AssertionError, match="not so"):
            looked_up(scheduler, "hangs", limit_s=PREFETCH_S + 1)


def test_reset_of_a_stopped_and_of_a_killed_server_is_given_up_in_time(cache: Cache, scheduler: Any) -> None:
    assert scheduler.reset_cache()
    with cache.stopped():
        start = time.monotonic()
        assert not scheduler.reset_cache()
        assert LIMIT_S <= time.monotonic() - start < LIMIT_S + SLACK_S
        cache.kill()
        until(lambda: link_of(scheduler.req_clients[cache.url]).lost)
        start = time.monotonic()
        assert not scheduler.reset_cache()
        assert time.monotonic() - start < AT_ONCE_S
    cache.up(*USUAL)


def test_without_the_guard_the_lookup_hangs(cache: Cache, scheduler: Any, bare: Callable[..., None]) -> None:
    bare()
    with cache.stopped():
        scheduler.maybe_submit_lookup_request("hangs", tokens())
        with pytest.raises(AssertionError, match="not so"):
            looked_up(scheduler, "hangs", limit_s=LIMIT_S + 1)


def test_killed_server_ends_what_was_asked_of_it_and_its_return_is_noticed(cache: Cache, scheduler: Any) -> None:
    before = tallies.snapshot()
    with cache.stopped():
        scheduler.maybe_submit_lookup_request("lost", tokens())
        cache.kill()
        found, seconds = looked_up(scheduler, "lost")
    assert (found, gained(before, "lmcache_outages lost")) == (0, 1)
    assert seconds < AT_ONCE_S
    time.sleep(1.0)  # several heartbeats go by
    client = scheduler.req_clients[cache.url]
    assert len(client._message_queue_client.pending_futures) <= 1, "pings pile up in the socket's queue"
    for answerless in (client.end_session("x"), client.lookup(None, 1)):
        with pytest.raises(ServerUnavailableError):
            answerless.result(timeout=0)
    cache.up(*USUAL)
    until(lambda: scheduler.is_healthy)
    before = tallies.snapshot()
    scheduler.maybe_submit_lookup_request("after", tokens())
    assert looked_up(scheduler, "after")[1] < LIMIT_S
    assert gained(before, "lmcache_misses") == 0


def test_without_the_guard_a_killed_server_leaves_requests_pending(
    cache: Cache, scheduler: Any, bare: Callable[..., None]
) -> None:
    bare()
    with cache.stopped():
        scheduler.maybe_submit_lookup_request("hangs", tokens())
        cache.kill()
        with pytest.raises(AssertionError, match="not so"):
            looked_up(scheduler, "hangs", limit_s=LIMIT_S + 1)


def test_server_that_returns_with_another_chunk_size_is_not_used(
    cache: Cache, scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.maybe_submit_lookup_request("starts the heartbeat", tokens())
    looked_up(scheduler, "starts the heartbeat")
    cache.kill()
    until(lambda: not scheduler.is_healthy)
    cache.up("--chunk-size", str(2 * CHUNK), "--supported-transfer-mode", "auto")
    until(lambda: "came back with chunk size 256" in caplog.text)
    time.sleep(1.0)
    assert not scheduler.is_healthy
    assert caplog.text.count("came back with chunk size") == 1
    cache.up(*USUAL)
    until(lambda: scheduler.is_healthy)


def test_stopped_server_holds_a_store_up_once_and_raises_nothing(cache: Cache, worker: Any) -> None:
    worker.submit_store_request("stored", operation(0, [0, 1]), None)
    assert worker.store_futures["stored"].result(timeout=30) is True
    before = tallies.snapshot()
    with cache.stopped():
        start = time.monotonic()
        for n in range(5):
            worker.submit_store_request(f"lost {n}", operation(10_000 + n, [2, 3]), None)
        assert time.monotonic() - start < 2 * TRANSFER_S, "held up more than once"
        assert gained(before, "lmcache_lost_stores") == 5
        sent, _ = worker.get_finished({f"lost {n}" for n in range(5)})
        assert {f"lost {n}" for n in range(1, 5)} <= set(sent or ())
    until(lambda: worker.is_healthy)
    worker.submit_store_request("again", operation(20_000, [4, 5]), None)
    assert worker.store_futures["again"].result(timeout=30) is True


def test_load_from_a_stopped_server_is_marked_for_recomputation(cache: Cache, worker: Any, scheduler: Any) -> None:
    worker.submit_store_request("source", operation(50_000, [0, 1]), None)
    scheduler.maybe_submit_lookup_request("loads", tokens(2 * CHUNK, first=50_000))
    assert looked_up(scheduler, "loads")[0] == 2 * CHUNK
    before = tallies.snapshot()
    with cache.stopped():
        start = time.monotonic()
        worker.submit_retrieve_request("loads", operation(50_000, [6, 7]), None)
        worker.submit_retrieve_request("loads too", operation(50_000, [8, 9]), None)
        assert time.monotonic() - start < 2 * TRANSFER_S, "held up more than once"
        _, received = worker.get_finished(set())
        assert received == {"loads", "loads too"}
        assert worker.get_block_ids_with_load_errors() == {6, 7, 8, 9}
        assert worker.get_finished(set())[1] == set()
    assert gained(before, "lmcache_misses load_failed") == 2


def test_load_brings_the_stored_bytes_back(worker: Any, scheduler: Any) -> None:
    worker.submit_store_request("writes", operation(60_000, [0, 1]), None)
    scheduler.maybe_submit_lookup_request("reads", tokens(2 * CHUNK, first=60_000))
    assert looked_up(scheduler, "reads")[0] == 2 * CHUNK
    worker.submit_retrieve_request("reads", operation(60_000, [10, 11]), None)
    assert worker.get_finished(set())[1] == {"reads"}
    assert worker.get_block_ids_with_load_errors() == set()
    for layer in worker.kv_caches.values():
        assert torch.equal(layer[[0, 1]], layer[[10, 11]])


@pytest.fixture
def served_worker(cache: Cache) -> Iterator[Any]:
    """A worker whose blocks the server moves itself; a store and a load were sent, and the server stands still."""
    adapter = worker_for(cache.url, mode="lmcache_driven")
    with cache.stopped():
        adapter.submit_store_request("store", operation(70_000, [0, 1]), adapter.create_recorded_event())
        adapter.submit_retrieve_request("load", operation(70_000, [2, 3]), adapter.create_recorded_event())
        until(lambda: not adapter.is_healthy)  # the heartbeat has found the server silent
        yield adapter
    adapter.shutdown()


def test_transfer_by_a_silent_server_keeps_its_blocks(cache: Cache, served_worker: Any) -> None:
    assert served_worker.get_finished({"store"}) == (set(), set())
    assert {"store"} == set(served_worker.store_futures)
    assert {"load"} == set(served_worker.retrieve_futures)
    cache.kill()
    until(lambda: served_worker.get_finished(set())[1] == {"load"})
    assert served_worker.get_block_ids_with_load_errors() == {2, 3}
    assert not served_worker.store_futures


def test_without_the_guard_the_blocks_go_back_while_the_server_may_write_them(
    served_worker: Any, bare: Callable[..., None]
) -> None:
    bare("LMCacheMPWorkerAdapter.get_finished")
    assert served_worker.get_finished({"store"})[1] == {"load"}


def test_transfer_that_ends_with_the_connection_between_two_looks_is_no_exception(
    cache: Cache, served_worker: Any
) -> None:
    served_worker._health_event.set()  # as if the break came after the look at the health event
    cache.kill()
    until(lambda: served_worker.retrieve_futures["load"][0].raw_future_.exception_ is not None)
    served_worker._health_event.set()
    assert served_worker.get_finished(set())[1] == {"load"}


@pytest.fixture
def driven_worker(cache: Cache) -> Iterator[Any]:
    """A worker whose blocks the server moves itself."""
    adapter = worker_for(cache.url, mode="lmcache_driven")
    yield adapter
    adapter.shutdown()


@pytest.fixture
def driven_scheduler(cache: Cache) -> Iterator[Any]:
    """The scheduler's side of the same."""
    adapter = scheduler_for(cache.url, mode="lmcache_driven")
    yield adapter
    adapter.shutdown()


def stored_and_given_away(cache: Cache, worker: Any, first: int, ends: Callable[[], None]) -> tuple[list[Any], bool]:
    """Preempt a request while the server, which stands still, is to store its blocks; write into them once that may be.

    The blocks are 1 and 2, because 0 is vLLM's null block, which LMCache leaves out. Returns what was in them, and
    whether they were held until the server went on.
    """

    def give_away() -> None:
        worker.handle_preemptions(True)
        for layer in worker.kv_caches.values():
            layer[[1, 2]] += 1

    stored = [layer[[1, 2]].clone() for layer in worker.kv_caches.values()]
    giving = threading.Thread(target=give_away)
    with cache.stopped():
        worker.submit_store_request(f"preempted {first}", operation(first, [1, 2]), worker.create_recorded_event())
        until(lambda: not worker.is_healthy)
        giving.start()
        giving.join(3)
        held = giving.is_alive()
        ends()
    giving.join(60)
    assert not giving.is_alive()
    return stored, held


def loaded(worker: Any, scheduler: Any, first: int) -> list[Any]:
    """What LMCache has for the two blocks that were stored, loaded into blocks 10 and 11."""
    until(lambda: worker.is_healthy and scheduler.is_healthy)
    until(lambda: worker.get_finished(set()) and not worker.store_futures)
    asked: list[str] = []

    def known() -> bool:
        """The server answers a store before it has published it."""
        asked.append(f"reads {first} {len(asked)}")
        scheduler.maybe_submit_lookup_request(asked[-1], tokens(2 * CHUNK, first=first))
        return looked_up(scheduler, asked[-1])[0] == 2 * CHUNK

    until(known)
    worker.submit_retrieve_request(asked[-1], operation(first, [10, 11]), worker.create_recorded_event())
    until(lambda: worker.get_finished(set())[1] == {asked[-1]})
    return [layer[[10, 11]].clone() for layer in worker.kv_caches.values()]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_a_load_that_the_server_denies_is_computed_anew(driven_worker: Any) -> None:
    """The server copies, so its answer comes later; up to LMCache 0.5.4 stock took a denial for a success."""
    before = tallies.snapshot()
    driven_worker.submit_retrieve_request("denied", operation(80_000, [2, 3]), driven_worker.create_recorded_event())
    until(lambda: driven_worker.get_finished(set())[1] == {"denied"})
    assert driven_worker.get_block_ids_with_load_errors() == {2, 3}
    assert driven_worker.get_finished(set())[1] == set(), "once"
    assert gained(before, "lmcache_misses load_failed") == 1


def test_blocks_of_a_preempted_request_are_held_while_a_silent_server_may_read_them(
    cache: Cache, driven_worker: Any, driven_scheduler: Any
) -> None:
    stored, held = stored_and_given_away(cache, driven_worker, 90_000, lambda: None)
    assert held
    assert same(loaded(driven_worker, driven_scheduler, 90_000), stored)


def test_without_the_guard_the_server_stores_what_was_written_meanwhile(
    cache: Cache, driven_worker: Any, driven_scheduler: Any, bare: Callable[..., None]
) -> None:
    bare("LMCacheMPWorkerAdapter.handle_preemptions")
    stored, held = stored_and_given_away(cache, driven_worker, 91_000, lambda: None)
    assert not held
    assert not same(loaded(driven_worker, driven_scheduler, 91_000), stored)


def test_blocks_of_a_preempted_request_are_free_once_the_server_is_gone(cache: Cache, driven_worker: Any) -> None:
    _, held = stored_and_given_away(cache, driven_worker, 92_000, cache.kill)
    assert held


@pytest.fixture
def shared_memory_worker(running_cache: Cache) -> Iterator[Any]:
    name = f"splint_{os.getpid()}"
    running_cache.up(*USUAL, "--no-l1-use-lazy", "--shm-name", name)
    adapter = worker_for(running_cache.url)
    yield adapter
    adapter.shutdown()
    running_cache.kill()
    Path(f"/dev/shm/lmcache_l1_pool_{name}").unlink(missing_ok=True)  # a killed server leaves it


def test_store_through_shared_memory_raises_nothing_either(running_cache: Cache, shared_memory_worker: Any) -> None:
    shared_memory_worker.submit_store_request("stored", operation(80_000, [0, 1]), None)
    assert shared_memory_worker.store_futures["stored"].result(timeout=30) is True
    with running_cache.stopped():
        shared_memory_worker.submit_store_request("lost", operation(81_000, [2, 3]), None)
        assert "lost" not in shared_memory_worker.store_futures


def test_without_the_guard_a_store_through_shared_memory_kills_the_forward_pass(
    running_cache: Cache, shared_memory_worker: Any, bare: Callable[..., None]
) -> None:
    bare("LMCacheMPWorkerAdapter.submit_store_request")
    with running_cache.stopped(), pytest.raises(TimeoutError):
        shared_memory_worker.submit_store_request("kills", operation(82_000, [2, 3]), None)


def test_no_server_is_refused_within_the_start_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.lmcache_availability.start.start_limit_s", lambda: 1.5)
    url = f"tcp://127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(EnvironmentRefusedError) as refused:
        scheduler_for(url, block_tokens=16)
    assert 1.0 < time.monotonic() - start < 1.5 + SLACK_S
    port = url.rpartition(":")[2]
    assert f"lmcache server --host 127.0.0.1 --port {port} --chunk-size 256" in refused.value.remedy
    assert "--supported-transfer-mode auto" in refused.value.remedy


def test_server_that_starts_later_than_the_engine_is_waited_for(cache: Cache) -> None:
    """A proxy accepts and closes at first, as a container's published port does before its server listens."""
    proxy = socket.create_server(("127.0.0.1", 0))
    opens = time.monotonic() + 1.5
    threading.Thread(target=forward, args=(proxy, cache.port, opens), daemon=True).start()
    start = time.monotonic()
    adapter = scheduler_for(f"tcp://127.0.0.1:{proxy.getsockname()[1]}")
    assert time.monotonic() - start < 1.5 + SLACK_S
    assert adapter.lmcache_tokens_per_chunk == CHUNK
    adapter.shutdown()
    proxy.close()


def forward(proxy: socket.socket, port: int, opens: float) -> None:
    while True:
        try:
            client, _ = proxy.accept()
        except OSError:
            return
        if time.monotonic() < opens:
            client.close()
            continue
        upstream = socket.create_connection(("127.0.0.1", port))
        for source, sink in ((client, upstream), (upstream, client)):
            threading.Thread(target=pump, args=(source, sink), daemon=True).start()


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        sink.close()


def test_chunk_size_that_does_not_fit_the_blocks_is_refused_with_the_one_that_does(cache: Cache) -> None:
    start = time.monotonic()
    with pytest.raises(EnvironmentRefusedError) as refused:
        scheduler_for(cache.url, block_tokens=96)
    assert time.monotonic() - start < SLACK_S
    assert "chunk size 128" in refused.value.found
    assert "--chunk-size 192" in refused.value.remedy


def test_server_without_the_engines_transfer_mode_is_refused_in_seconds(running_cache: Cache) -> None:
    running_cache.up("--chunk-size", str(CHUNK), "--supported-transfer-mode", "lmcache_driven")
    start = time.monotonic()
    with pytest.raises(EnvironmentRefusedError) as refused:
        worker_for(running_cache.url)
    assert time.monotonic() - start < SLACK_S
    assert "not to the registration" in refused.value.found
    assert "--supported-transfer-mode auto" in refused.value.remedy
