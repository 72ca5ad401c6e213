"""The first prompt of a fresh CPU engine is one token long: on a CPU with AMX, stock dies of it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
import torch
from support.expert_parallel_probe import score
from support.servers import Server

pytestmark = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX tiles")


@pytest.mark.parametrize(
    "tokens", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_a_short_first_prompt_is_answered(serve: Callable[..., Server], tokens: int) -> None:
    server = serve(env={"SPLINT_SMOKE": "off"})
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        assert len(score(client, (5,) * tokens).tokens) == 8


def test_without_the_patch_it_still_kills_the_worker(serve: Callable[..., Server]) -> None:
    """When this fails, vLLM has mended it: retire the patch."""
    server = serve(env={"SPLINT_SMOKE": "off", "SPLINT_PATCHES": "-cpu_amx_permission"})
    with httpx.Client(base_url=server.base_url, timeout=60) as client, pytest.raises(httpx.HTTPError):
        score(client, (5,))
