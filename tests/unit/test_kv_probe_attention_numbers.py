"""The numbers of the attention trial: none that a kernel may take for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from patches.kv_probe.attention import _Trial


def test_no_number_is_subnormal_in_e5m2() -> None:
    """Of 10 million numbers between -1 and 1 some hundred would be."""
    trial: Any = SimpleNamespace(source=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    numbers = _Trial._exact(trial, (10_000_000,), "float8_e5m2").abs()
    assert numbers[numbers > 0].min() >= torch.finfo(torch.float8_e5m2).tiny
