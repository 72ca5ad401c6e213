"""Multiply small whole numbers on one device and compare with the exact product: ``matmul cuda:0``."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

from patches.supervision.processes import die_with_parent

SIDE = 1024
INNER = 64
"""Sums of at most 64 products of -1, 0 and 1 are exact in bfloat16, which knows whole numbers up to 256."""


def multiply(device: str) -> dict[str, Any]:
    """Compare the product on ``device`` with that of 64-bit integers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-1, 2, (SIDE, INNER), generator=generator)
    right = torch.randint(-1, 2, (INNER, SIDE), generator=generator)
    start = time.perf_counter()
    found = (left.to(device, torch.bfloat16) @ right.to(device, torch.bfloat16)).float().cpu()
    wrong = int((found != (left @ right).float()).sum())
    return {
        "wrong": wrong,
        "cells": found.numel(),
        "not_finite": int((~torch.isfinite(found)).sum()),
        "seconds": round(time.perf_counter() - start, 3),
    }


def main() -> None:
    """Run, and print what came out."""
    die_with_parent(signal.SIGKILL)
    device = sys.argv[1]
    found = multiply(device)
    if device.startswith("cuda"):
        import torch

        found["name"] = torch.cuda.get_device_name(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
