"""One server of the image under its users: the OpenAI SDK in its forms, and ``vllm bench serve``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.containers import Container, container
from support.servers import free_port

pytestmark = pytest.mark.full

FLAGS = (
    "--served-model-name", "tiny", "--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager",
    "--max-num-seqs", "8", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip
MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weigh", "parameters": {"type": "object", "properties": {"grams": {"type": "integer"}}}},
    }
]


@pytest.fixture(scope="module")
def server(images: Any, model: str, network: str) -> Iterator[tuple[Container, str]]:
    port = free_port()
    options = ("--network", network, "--volume", f"{model}:/model:ro", "--publish", f"127.0.0.1:{port}:8000")
    with container(images.gpu, "/model", *FLAGS, options=options) as found:
        print(f"healthy after {found.wait_healthy():.1f} s")
        yield found, f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def client(server: tuple[Container, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server[1], api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_whole_and_streamed_answers_agree_and_carry_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    parts = client.chat.completions.create(**asked, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 12


def test_the_async_client_asks_side_by_side(server: tuple[Container, str]) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server[1], api_key="none", max_retries=0, timeout=60) as client:
            asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
            return await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(4)))

    assert len({answer.choices[0].message.content for answer in asyncio.run(ask())}) == 1


def test_a_forced_tool_call_names_the_tool(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weigh"}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=64, temperature=0
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "weigh"


def test_embeddings_are_refused_as_stock_refuses_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.embeddings.create(model="tiny", input="a splint")
    assert refused.value.status_code == 404


def test_vllm_bench_serve_runs_against_it(server: tuple[Container, str]) -> None:
    shown = server[0].execute(
        "vllm", "bench", "serve", "--model", "/model", "--served-model-name", "tiny", "--num-prompts", "8",
        "--random-input-len", "64", "--random-output-len", "8", "--dataset-name", "random", timeout_s=240,
    )  # fmt: skip
    print(shown[-1500:])
    assert "Successful requests:                     8" in shown
