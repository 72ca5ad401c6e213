"""Whether the server is ready, and what to say then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx

from entrypoint.local.plan import Plan

__all__ = ["ready_text", "wait_for_cache", "wait_until_ready"]

POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 2.0


async def wait_for_cache(url: str) -> None:
    """Return once the LMCache server's health check answers 200."""
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        while await _status(client, f"{url}/healthcheck") != httpx.codes.OK:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


async def wait_until_ready(url: str, say: Callable[[str], None]) -> None:
    """Return once the server takes requests; ``say`` gets each new phase."""
    last = ""
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, verify=False) as client:  # noqa: S501 - loopback
        while (phase := await _phase(client, url)) != "":
            if phase != last:
                say(phase)
                last = phase
            await asyncio.sleep(POLL_SECONDS)


async def _status(client: httpx.AsyncClient, url: str) -> int | None:
    try:
        return (await client.get(url)).status_code
    except httpx.HTTPError:
        return None


async def _phase(client: httpx.AsyncClient, url: str) -> str:
    """What the server is at; empty when it is ready. Stock has no ``/startupz``, so its ``/health`` decides there."""
    try:
        answer = await client.get(f"{url}/startupz")
        if answer.status_code == httpx.codes.NOT_FOUND:
            answer = await client.get(f"{url}/health")
    except httpx.HTTPError:
        return "loading (not listening yet)"
    return "" if answer.status_code == httpx.codes.OK else _named_phase(answer.text)


def _named_phase(body: str) -> str:
    try:
        named = json.loads(body)["phase"]
    except (ValueError, KeyError, TypeError):
        named = None
    return str(named or "listening, not ready yet")


def ready_text(plan: Plan, seconds: float, cache_port: int) -> str:
    """The ready line, and how to use the server."""
    body = json.dumps({"model": plan.served_name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16})
    key, header = ("$API_KEY", ' -H "Authorization: Bearer $API_KEY"') if plan.takes_a_key else ("none", "")
    return f"""
READY after {seconds:.0f} s: {plan.url}/v1, model {plan.served_name}, LMCache server on port {cache_port}

  curl {plan.url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{plan.url}/v1", api_key="{key}")
  answer = client.chat.completions.create(
      model="{plan.served_name}", messages=[{{"role": "user", "content": "Hello"}}], max_tokens=16
  )
  print(answer.choices[0].message.content)

  What was patched and proven: curl {plan.url}/splint/report        Stop: Ctrl-C
"""
