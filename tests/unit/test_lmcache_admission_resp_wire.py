"""The connection to Redis, against a server that answers whatever the test says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from patches.lmcache_admission import resp_wire
from patches.lmcache_admission.resp_wire import Connection, OutOfStepError, command


@contextmanager
def answering(*answers: bytes, credentials: tuple[str, ...] = ()) -> Iterator[Connection]:
    """A connection whose server sends these bytes at once, then ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"".join(answers))
                peer.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        connection = Connection("127.0.0.1", listener.getsockname()[1], credentials)
        yield connection
        connection.close()
        thread.join()


def test_value_of_another_size_is_read_away_and_the_next_answer_is_its_own() -> None:
    target = memoryview(bytearray(4))
    long = b"x" * 200_000
    with answering(
        b"$200000\r\n", long, b"\r\n$2\r\n:1\r\n$-1\r\n-ERR no\r\n$4\r\nabcd\r\n:1\r\n+OK\r\n-OOM\r\n"
    ) as connection:
        assert [connection.into(target) for _ in range(5)] == [False, False, False, False, True]
        assert bytes(target) == b"abcd"
        assert connection.integer() == 1
        assert [connection.done(), connection.done()] == [True, False]


def test_value_longer_than_the_buffer_comes_whole() -> None:
    content = bytes(range(256)) * 1024
    target = memoryview(bytearray(len(content)))
    with answering(b"$%d\r\n" % len(content), content, b"\r\n:7\r\n") as connection:
        assert connection.into(target)
        assert bytes(target) == content
        assert connection.integer() == 7


@pytest.mark.parametrize("answer", [b"+OK\r\n", b"$4\r\nabcdxx\r\n", b"$4\r\nab", b"z" * 9000, b"*1\r\n$1\r\na\r\n"])
def test_answer_out_of_step_ends_the_connection_s_use(answer: bytes) -> None:
    with answering(answer) as connection:
        connection.send([command("GET", "key")])
        with pytest.raises(OutOfStepError):
            connection.into(memoryview(bytearray(4)))


def test_refused_credentials_are_said() -> None:
    with (
        pytest.raises(PermissionError, match="refuses AUTH"),
        answering(b"-WRONGPASS no\r\n", credentials=("user", "secret")),
    ):
        pass


def test_command_is_what_redis_reads() -> None:
    assert command("GET", "ключ") == b"*2\r\n$3\r\nGET\r\n$8\r\n" + "ключ".encode() + b"\r\n"


def test_value_that_takes_long_but_moves_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp_wire, "SILENT_S", 2.0)
    value = memoryview(bytes(24 << 20))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received: list[int] = []

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                while piece := peer.recv(1 << 18):
                    received.append(len(piece))
                    time.sleep(0.04)

        thread = threading.Thread(target=serve)
        thread.start()
        connection = Connection("127.0.0.1", listener.getsockname()[1])
        try:
            connection.send([value])
        finally:
            connection.close()
            thread.join()
    assert sum(received) == len(value)


def test_server_that_sends_nothing_is_given_up_after_a_second() -> None:
    assert resp_wire.SILENT_S == 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            Connection("127.0.0.1", listener.getsockname()[1], ("secret",))
        assert 0.9 < time.monotonic() - start < 20
