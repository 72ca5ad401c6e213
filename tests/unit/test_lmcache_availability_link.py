from __future__ import annotations

import logging
import threading

import pytest

from patches.framework import settings, tallies
from patches.lmcache_availability import connection, limits
from patches.lmcache_availability.link import Link, ServerUnavailableError, State
from patches.lmcache_availability.start import server_command


@pytest.fixture
def link() -> Link:
    made = Link()
    made.url, made.block_tokens, made.chunk_tokens = "tcp://cache:5555", 16, 256
    return made


@pytest.fixture
def health(link: Link) -> threading.Event:
    event = threading.Event()
    event.set()
    link.watch(event, lambda: woken.append(event))
    return event


woken: list[threading.Event] = []


@pytest.fixture(autouse=True)
def nothing_woken() -> None:
    woken.clear()


def test_lost_connection_clears_health_and_wakes_the_heartbeat_once(link: Link, health: threading.Event) -> None:
    link.disconnected()
    link.disconnected()
    assert link.lost
    assert not health.is_set()
    assert woken == [health]


def test_silence_after_proof_of_loss_changes_nothing(link: Link) -> None:
    link.disconnected()
    link.overdue("ping")
    assert link.lost


def test_loss_after_silence_is_proof(link: Link) -> None:
    link.overdue("lookup")
    assert link.state is State.SILENT
    link.disconnected()
    assert link.lost


def test_answer_does_not_set_health_itself_because_registration_comes_first(
    link: Link, health: threading.Event
) -> None:
    link.disconnected()
    link.answered()
    assert link.state is State.ANSWERING
    assert not health.is_set()
    assert not link.settled()


def test_every_outage_is_logged_once_and_its_end_too(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            link.disconnected()
            link.overdue("ping")
        for _ in range(3):
            link.answered()
    assert [("is gone" in text, "answers again" in text) for text in caplog.messages] == [(True, False), (False, True)]


def test_connection_that_we_close_is_no_outage(link: Link, health: threading.Event) -> None:
    link.closing = True
    link.disconnected()
    assert health.is_set()


def test_heartbeat_that_starts_during_an_outage_starts_unhealthy(link: Link) -> None:
    link.disconnected()
    late = threading.Event()
    late.set()
    link.watch(late, lambda: None)
    assert not late.is_set()


def test_trouble_before_service_is_not_reported_as_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    before = tallies.snapshot()
    starting = Link()
    starting.disconnected()
    starting.answered()
    assert (caplog.messages, tallies.snapshot()) == ([], before)


def test_unavailability_is_a_timeout_for_lmcache_and_a_lost_connection_for_people() -> None:
    assert issubclass(ServerUnavailableError, TimeoutError)
    assert issubclass(ServerUnavailableError, ConnectionError)


def test_every_limit_names_a_known_setting() -> None:
    known = {setting.name for setting in settings.SETTINGS}
    assert set(limits.LIMITED_BY.values()) <= known


@pytest.mark.parametrize("operation", ["store", "retrieve", "register_kv_cache"])
def test_what_the_server_may_still_do_to_the_engines_blocks_has_no_limit(operation: str) -> None:
    assert limits.limit_s(operation) is None


def test_look_up_and_transfer_limits_together_stay_under_two_seconds() -> None:
    defaults = {
        setting.name: float(setting.default)
        for setting in settings.SETTINGS
        if setting.name in limits.LIMITED_BY.values()
    }
    assert defaults["SPLINT_LMCACHE_LOOKUP_TIMEOUT_S"] + defaults["SPLINT_LMCACHE_TRANSFER_TIMEOUT_S"] < 2


def test_an_engines_first_store_may_take_as_long_as_a_start() -> None:
    start, transfer = limits.start_limit_s(), limits.limit_s("commit_store")
    assert transfer is not None
    assert limits.first_limit_s("commit_store") == start > transfer
    assert limits.first_limit_s("prepare_retrieve") == limits.limit_s("prepare_retrieve")
    assert limits.first_limit_s("lookup") == limits.limit_s("lookup")
    assert limits.first_limit_s("store") is None


def test_only_the_first_request_of_a_kind_is_the_first() -> None:
    link = Link()
    assert [link.first("prepare_store"), link.first("commit_store"), link.first("prepare_store")] == [True, True, False]


def test_the_second_store_is_given_the_usual_time_again() -> None:
    link = Link()
    watches = [vars(connection._watched(Future(), link, "commit_store", [Key, 1, b""])) for _ in range(2)]
    left = [watch["splint_watch"].left_s() for watch in watches]
    usual = limits.limit_s("commit_store")
    assert usual is not None
    assert left[0] > usual >= left[1] > 0


@pytest.mark.parametrize(("block", "chunk"), [(16, 256), (128, 256), (96, 192), (300, 300), (1056, 1056)])
def test_server_command_names_a_chunk_size_that_is_a_multiple_of_the_block_size(block: int, chunk: int) -> None:
    command = server_command("tcp://127.0.0.1:5555", block)
    assert f"--host 127.0.0.1 --port 5555 --chunk-size {chunk} " in command


class Key:
    start, end = 0, 1024


class Future:
    """What a request to the server returns."""


def test_large_transfer_in_messages_is_given_the_time_that_its_bytes_take() -> None:
    assert limits.message_s("commit_store", [Key, 1, bytes(1 << 20)], 0.0) == 1 / 64
    assert limits.message_s("prepare_retrieve", [Key, 1], float(256 << 10)) == 4.0
    assert limits.message_s("prepare_retrieve", [Key, 1], 0.0) == 0.0
    assert limits.message_s("prepare_store", [Key, 1], float(256 << 10)) == 0.0
