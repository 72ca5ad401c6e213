"""A smoke plan for a server that somebody else has started, from what its public endpoints tell."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx

from patches.framework.errors import SplintError
from patches.serving_gate.plan import CheckResult, SmokePlan, Verdict

__all__ = ["plan_for", "with_an_answer"]

# Random prompts come from the bytes and letters at the start of any vocabulary, whose size is not published.
VOCABULARY = 512
DEFAULT_BLOCK = 16
DEFAULT_CONTEXT = 2048

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_ENGINE = re.compile(r'^vllm:request_success_total\{.*?\bengine="(\d+)"', re.MULTILINE)


def _get(client: httpx.Client, path: str) -> httpx.Response:
    try:
        return client.get(path).raise_for_status()
    except httpx.HTTPError as error:
        raise SplintError(
            f"no usable answer from {client.base_url}{path} ({error})",
            "an OpenAI-compatible server",
            "Give its address with --base-url, without /v1, and its key with --api-key.",
        ) from error


def _metrics(client: httpx.Client) -> str:
    try:
        return _get(client, "/metrics").text
    except SplintError:
        return ""


def _number(labels: dict[str, str], name: str, default: int) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else default


def plan_for(base_url: str, api_key: str | None, timeout_s: float) -> SmokePlan:
    """What can be proven about the server at ``base_url`` without its secret.

    Args:
        base_url: Without ``/v1``.
        api_key: Bearer token, or None.
        timeout_s: For the whole battery, in seconds.

    Raises:
        SplintError: nothing there speaks the OpenAI API.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s, trust_env=False) as client:
        models: list[dict[str, Any]] = _get(client, "/v1/models").json().get("data") or []
        metrics = _metrics(client)
    if not models:
        raise SplintError(f"no model at {base_url}", "a served model", "Wait until the server has loaded one.")
    config = _CACHE_CONFIG.search(metrics)
    labels = dict(_LABEL.findall(config["labels"])) if config else {}
    return SmokePlan(
        base_url=base_url,
        secret="",
        model=models[0]["id"],
        runner="generate",
        max_model_len=models[0].get("max_model_len") or DEFAULT_CONTEXT,
        block_size=_number(labels, "block_size", DEFAULT_BLOCK),
        vocab_size=VOCABULARY,
        prefix_caching=labels.get("enable_prefix_caching") == "True",
        extensions="vllm:" in metrics or bool(models[0].get("max_model_len")),
        dp_ranks=tuple(sorted({int(engine) for engine in _ENGINE.findall(metrics)})) or (0,),
        cache_dtype=labels.get("cache_dtype", "unknown"),
        expected_roster=(),
        timeout_s=timeout_s,
        api_key=api_key,
    )


def with_an_answer(verdict: Verdict) -> Verdict:
    """``verdict``, failed where no check but that of the model list had anything to test.

    Behind the gate the server's own memory is proven besides; from outside such a verdict would say nothing.
    """
    if any(check.status != "skipped" for check in verdict.checks if check.id != "models"):
        return verdict
    nothing = CheckResult(
        "answers",
        "The server answers a prompt.",
        "failed",
        0.0,
        "found no endpoint that answers a prompt, so nothing was tested; wanted one. Does the model generate?",
    )
    return replace(verdict, status="failed", checks=(*verdict.checks, nothing))
