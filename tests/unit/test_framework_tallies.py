"""Tallies: counted by reason, logged once a minute, readable from other processes and in /metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patches.framework import report, roster, tallies
from patches.framework.counters import Counters


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "_cells", Counters())
    monkeypatch.setattr(tallies, "_said", {})
    monkeypatch.setattr(tallies, "_new_name", None)


def test_counts_add_up_by_label() -> None:
    tallies.miss("wrong_size", "fs", "a file of 12 bytes", 2)
    tallies.miss("wrong_size", "fs", "a file of 13 bytes")
    tallies.miss("wrong_size", "redis", "a value of 13 bytes")
    assert tallies.snapshot() == {"lmcache_misses wrong_size fs": 3, "lmcache_misses wrong_size redis": 1}


def test_a_reason_is_logged_once_a_minute_with_what_was_held_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("patches.framework.tallies.time.monotonic", lambda: now)
    for _ in range(5):
        tallies.miss("wrong_size", "fs", "a file of 12 bytes")
    tallies.miss("wrong_size", "redis", "another tier is another reason")
    assert [record.args[:3] for record in caplog.records] == [("wrong_size", "fs", 1), ("wrong_size", "redis", 1)]  # type: ignore[index]
    now += tallies.LOGGED_EVERY_S
    tallies.miss("wrong_size", "fs", "a file of 12 bytes")
    assert caplog.records[-1].args[:3] == ("wrong_size", "fs", 5)  # type: ignore[index]


@pytest.mark.parametrize("labels", [(), ("one",), ("two words", "fs"), ("", "fs")])
def test_labels_that_do_not_fit_are_an_error(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="lmcache_misses takes"):
        tallies.add("lmcache_misses", *labels)


class Interrupted(Counters):
    """Another thread gets its turn between the reading and the writing of a cell."""

    def increase(self, name: str, by: int) -> None:
        read = self.values().get(name, 0)
        time.sleep(0.001)
        super().increase(name, read + by - self.values().get(name, 0))


def test_no_count_is_lost_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "_cells", Interrupted())

    def count() -> None:
        for _ in range(10):
            tallies.add("lmcache_stored_tokens", count=3)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tallies.snapshot() == {"lmcache_stored_tokens": 120}


def test_a_new_name_is_told_once() -> None:
    told: list[tuple[str, ...]] = []
    tallies.on_new_name(lambda: told.append(tallies.names()))
    tallies.add("lmcache_stored_tokens")
    tallies.add("lmcache_stored_tokens")
    assert told == [("lmcache_stored_tokens",)]


COUNTING = """
import time
from patches.framework import process, tallies
from patches.framework.records import Role
process.start().take_role(Role.WORKER, dp_rank=0, rank=0)
tallies.add("lmcache_saved_tokens", count=256)
tallies.miss("load_failed", "server", "the server went")
print("counted", flush=True)
input()
tallies.add("lmcache_saved_tokens", count=1)
print("again", flush=True)
input()
"""


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The run directory of a process that counts and then waits for a line on its input."""
    with subprocess.Popen(
        [sys.executable, "-c", COUNTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"SPLINT_RUN_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        yield tmp_path, process
        process.kill()


def test_another_process_reads_them_while_they_move(counted: tuple[Path, subprocess.Popen[str]]) -> None:
    run_dir, process = counted
    (entry,) = roster.load(run_dir)
    assert entry["tallies"] == {"lmcache_saved_tokens": 256, "lmcache_misses load_failed server": 1}
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "again\n"
    assert roster.load(run_dir)[0]["tallies"]["lmcache_saved_tokens"] == 257
    found = {(row["name"], *row["labels"].values()): row["count"] for row in report.report(run_dir)["lmcache"]}
    assert found["lmcache_saved_tokens",] == 257
    assert found["lmcache_misses", "load_failed", "server"] == 1
    assert found["lmcache_misses", "lookup_unanswered", "server"] == 0


SCRAPE = """
import sys
from pathlib import Path
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
from patches.serving_gate.registering import register
from patches.serving_gate.tally_metrics import TallyCollector
register(TallyCollector(Path(sys.argv[1])))
registry = REGISTRY
if len(sys.argv) > 2:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=sys.argv[2])
print(generate_latest(registry).decode())
"""


@pytest.mark.parametrize("servers", ["one", "several"])
def test_metrics_show_them_with_one_and_with_several_api_servers(
    counted: tuple[Path, subprocess.Popen[str]], servers: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shared = str(tmp_path_factory.mktemp("prometheus"))
    several = servers == "several"
    scraped = subprocess.run(
        [sys.executable, "-c", SCRAPE, str(counted[0]), *([shared] if several else [])],
        env={"PYTHONPATH": ":".join(sys.path), **({"PROMETHEUS_MULTIPROC_DIR": shared} if several else {})},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = scraped.splitlines()
    assert 'splint_lmcache_misses_total{reason="load_failed",tier="server"} 1.0' in lines
    assert 'splint_lmcache_misses_total{reason="server_lost",tier="server"} 0.0' in lines
    assert "splint_lmcache_saved_tokens_total 256.0" in lines
    assert "# TYPE splint_lmcache_misses_total counter" in lines
    assert "splint_lmcache_stored_bytes_total 0.0" in lines


def test_attestations_of_older_releases_have_none(tmp_path: Path) -> None:
    folder = tmp_path / "roster"
    folder.mkdir()
    old = {"role": "worker", "pid": 1, "start_time": None, "seams": []}
    (folder / "1.json").write_text(json.dumps(old))
    assert tallies.total(roster.load(tmp_path))["lmcache_saved_tokens"] == {(): 0}
