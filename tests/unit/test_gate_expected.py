"""Which data-parallel ranks a node starts, which it sends requests to, and so which it must prove before it opens."""

from __future__ import annotations

from typing import Any

import pytest
from support.gate_stage import config

from patches.serving_gate.expected import local_dp_ranks, served_dp_ranks

HEAD = {"data_parallel_size": 4, "data_parallel_size_local": 2}


@pytest.mark.parametrize(
    ("parallel", "local", "served"),
    [
        ({}, (0,), (0,)),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, (0, 1), (0, 1)),
        (HEAD, (0, 1), (0, 1, 2, 3)),
        ({**HEAD, "data_parallel_size_local": 1}, (0,), (0, 1, 2, 3)),
        ({**HEAD, "local_engines_only": True, "data_parallel_rank": 2}, (2, 3), (2, 3)),
        ({**HEAD, "data_parallel_size_local": 1, "local_engines_only": True, "data_parallel_rank": 3}, (3,), (3,)),
    ],
    ids=["one engine", "one node", "head of two nodes", "head with one rank", "hybrid", "external"],
)
def test_a_head_sends_requests_to_the_ranks_of_the_other_nodes_too(
    parallel: dict[str, Any], local: tuple[int, ...], served: tuple[int, ...]
) -> None:
    found = config(**parallel).parallel_config
    assert (local_dp_ranks(found), served_dp_ranks(found)) == (local, served)
