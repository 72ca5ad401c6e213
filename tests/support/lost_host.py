"""A DP group on two hosts of which one is lost: two network namespaces and a cable between them, no privilege needed.

``unshare -Urn python -m support.lost_host RANK [KEEPALIVE]`` puts that rank of three on a host of its own, lets the
group watch, takes the host's address away, so that it answers nothing any more, and prints as JSON what each of the
others was told and after how many seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["COMMAND"]

SIZE = 3
PORT = 29500
NEAR, FAR = "10.99.0.1", "10.99.0.2"
COMMAND = ("unshare", "--user", "--map-root-user", "--net")


def _do(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def _hosts() -> Iterator[tuple[str, ...]]:
    """The command that runs another one on the far host."""
    other = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo there; exec sleep infinity"], stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    other.stdout.readline()
    there = ("nsenter", "--target", str(other.pid), "--net")
    try:
        _do("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(other.pid))
        for words, device, address in (((), "near", NEAR), (there, "far", FAR)):
            _do(*words, "ip", "address", "add", f"{address}/24", "dev", device)
            _do(*words, "ip", "link", "set", device, "up")
            _do(*words, "ip", "link", "set", "lo", "up")
        yield there
    finally:
        other.kill()
        other.wait()


def _rank(number: int, address: str, there: Sequence[str], keepalive: Sequence[str]) -> subprocess.Popen[str]:
    command = (
        *there,
        sys.executable,
        "-m",
        "support.watched_rank",
        str(number),
        str(SIZE),
        address,
        str(PORT),
        *keepalive,
    )
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def main(lost: int, *keepalive: str) -> None:
    """Lose the host of rank ``lost``."""
    with _hosts() as there:
        address = FAR if lost == 0 else NEAR
        ranks = [_rank(number, address, there if number == lost else (), keepalive) for number in range(SIZE)]
        try:
            for rank in ranks:
                assert _line(rank) == "watching"
            _do(*there, "ip", "address", "flush", "dev", "far")
            since = time.monotonic()
            told = [[_line(rank), time.monotonic() - since] for number, rank in enumerate(ranks) if number != lost]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
