"""A real Prometheus scrapes the main job: every rule is evaluated, every query of the dashboard has an answer."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support import monitoring
from support.servers import Server, free_port

pytestmark = pytest.mark.full

SCRAPES_FOR_S = 15


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"found no {name}; wanted one. Install Debian's package prometheus, which has it.")
    return found


@pytest.mark.parametrize(
    "command",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_promtool_finds_nothing_wrong(command: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [program("promtool"), *command], cwd=monitoring.FOLDER, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@contextmanager
def scraping(port: int, folder: Path) -> Iterator[str]:
    """A Prometheus with the deployed configuration, but for the target and the pace; yields its address."""
    config = yaml.safe_load((monitoring.FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(monitoring.FOLDER / "alerts.yml")]
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def ask(address: str, path: str, **parameters: str) -> Any:
    try:
        answer = httpx.get(f"{address}/api/v1/{path}", params=parameters, trust_env=False)
    except httpx.TransportError:
        return None
    return answer.json()["data"] if answer.status_code == 200 else None


def traffic(server: Server, number: int) -> None:
    """A prompt that is long enough for the caches, the same every second time."""
    prompt = [3 + (number // 2 * 7 + position) % 200 for position in range(300)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    httpx.post(server.base_url + "/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()


def test_prometheus_evaluates_every_rule_and_answers_every_query(stack: Server, tmp_path: Path) -> None:
    with scraping(stack.port, tmp_path) as address:
        stack.wait_for(lambda: (ask(address, "query", query="splint_ready") or {}).get("result"), 120)
        began, number = time.monotonic(), 0
        while time.monotonic() - began < SCRAPES_FOR_S:
            traffic(stack, number)
            number += 1
        rules = [rule for group in ask(address, "rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == {rule["alert"] for rule in monitoring.alerts()}
        assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] != "ok"} == {}
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
        answers = {name: ask(address, "query", query=query) for name, query in monitoring.queries().items()}
        empty = {name for name, answer in answers.items() if not numbers(answer)}
        print(f"{len(answers)} queries of the dashboard, {len(rules)} rules, {number} requests")
        assert empty == set()


def numbers(data: Any) -> list[float]:
    """The values of an instant query that are numbers."""
    return [value for result in data["result"] if not math.isnan(value := float(result["value"][1]))]
