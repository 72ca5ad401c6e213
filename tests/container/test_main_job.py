"""``docker compose --profile cpu up``: the whole main job in containers, as a user without a GPU starts it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from support.containers import Compose, wait_until

# Seconds of work for the tiny model on these cores.
IN_FLIGHT_TOKENS = 800
KILL_AN_ENGINE = """
import os, signal
from pathlib import Path
names = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/comm")}
os.kill(next(pid for pid, name in names.items() if "EngineCor" in name), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def url(main_job: Compose) -> str:
    return f"http://127.0.0.1:{main_job.environ['PORT']}"


def test_the_openai_sdk_is_answered_on_the_published_port(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        messages: Any = [{"role": "user", "content": "the quick brown fox"}]
        answer = client.chat.completions.create(model="tiny-moe", messages=messages, max_tokens=8, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_the_smoke_tests_saw_hits_from_the_lmcache_container(url: str) -> None:
    report = httpx.get(f"{url}/splint/report", timeout=20).json()
    checks = {check["id"]: check for check in report["verdict"]["checks"]}
    print(json.dumps(checks["kv_series"]["evidence"])[:600])
    assert report["verdict"]["status"] == "passed"
    assert checks["kv_series"]["status"] == "passed"
    assert checks["dp_ranks"]["status"] == "passed"
    metrics = httpx.get(f"{url}/metrics", timeout=20).text.splitlines()
    hits = [line for line in metrics if line.startswith("vllm:external_prefix_cache_hits_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in hits) > 0


def test_nothing_but_vllm_reaches_the_lmcache_server(main_job: Compose) -> None:
    cache = main_job.service("lmcache-cpu").inspect()
    assert {port: bound for port, bound in cache["NetworkSettings"]["Ports"].items() if bound} == {}
    names = set(cache["NetworkSettings"]["Networks"])
    assert names == {"splint-cpu_cache", "splint-cpu_second-level"}
    serving = main_job.service("vllm-cpu").inspect()
    assert set(serving["NetworkSettings"]["Networks"]) == {"splint-cpu_cache", "splint-cpu_default"}


@pytest.mark.full
def test_a_killed_engine_ends_the_server_with_an_error_and_it_is_started_again(main_job: Compose, url: str) -> None:
    """Stock ends with code 0, which a restart policy of on-failure takes for a wish."""
    serving = main_job.service("vllm-cpu")
    serving.execute("python3", "-c", KILL_AN_ENGINE)
    took = wait_until(lambda: serving.inspect()["RestartCount"] == 1, "started again", 30)
    print(f"started again {took:.1f} s after the kill, healthy {serving.wait_healthy():.1f} s later")
    assert httpx.get(f"{url}/health", timeout=20).status_code == 200


def test_a_stop_lets_requests_finish_and_ends_with_code_0(main_job: Compose, url: str) -> None:
    """Stock breaks them off."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        asked: Any = {"model": "tiny-moe", "prompt": "a splint", "max_tokens": IN_FLIGHT_TOKENS, "temperature": 0}
        stream = iter(client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}))
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(main_job.service("vllm-cpu").stop, 120)
            rest = list(stream)
            code, seconds = stopped.result()
    print(f"docker stop with a request of {IN_FLIGHT_TOKENS} tokens in flight: code {code} after {seconds:.1f} s")
    assert rest[-1].choices[0].finish_reason == "length"
    assert code == 0
    assert seconds < 110
