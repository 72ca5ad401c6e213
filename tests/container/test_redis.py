"""``--profile cpu --profile redis``: Redis as LMCache's second level."""

from __future__ import annotations

import json
import subprocess
import time

import httpx
from support.containers import ROOT, Compose, docker, wait_until
from support.images import Images
from support.servers import free_port

PROMPTS = 12
ADAPTER = json.dumps({"type": "resp", "host": "redis", "port": 6379}, separators=(",", ":"))


def test_what_is_stored_reaches_redis_and_comes_back_after_the_lmcache_server_was_started_again(images: Images) -> None:
    assert docker("image", "inspect", images.cpu)
    subprocess.run(["bash", "tools/containers/standins.sh", "redis"], cwd=ROOT, check=True, timeout=300)
    names = {"PORT": str(free_port()), "COMPOSE_PROJECT_NAME": "splint-redis"}
    compose = Compose(("cpu", "redis"), {**names, "LMCACHE_ARGS": f"--l2-adapter '{ADAPTER}'"})
    with compose.up():
        url = f"http://127.0.0.1:{names['PORT']}"
        redis = compose.service("redis")
        for number in range(PROMPTS):
            _ask(url, 0, number)
        took = wait_until(lambda: int(redis.execute("redis-cli", "dbsize").split()[-1]) > 0, "stored in Redis", 120)
        print(f"in Redis after {took:.1f} s: {redis.execute('redis-cli', 'dbsize')} keys")
        assert redis.health == "healthy"
        cache = compose.service("lmcache-cpu")
        docker("restart", "--time", "5", cache.id)
        cache.wait_healthy(120)
        before = _hits(url)
        # The engine notices the server's return after seconds; what rank 1 has not asked yet it does not have itself.
        taken = next((number for number in range(PROMPTS) if _hit_after_asking(url, number, before)), None)
        print(f"taken from Redis: prompt {taken}")
        assert taken is not None


def _ask(url: str, rank: int, number: int) -> None:
    body = {"model": "tiny-moe", "prompt": list(range(20 + number, 420 + number)), "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=60)
    answer.raise_for_status()


def _hit_after_asking(url: str, number: int, before: float) -> bool:
    time.sleep(2)
    _ask(url, 1, number)
    return _hits(url) > before


def _hits(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=20).text.splitlines()
    counted = [line for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")]
    return sum(float(line.rpartition(" ")[2]) for line in counted)
