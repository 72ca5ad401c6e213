"""``python -m entrypoint.local [--model MODEL] [--port PORT] [-- ARGUMENTS FOR VLLM SERVE]``, run by ``make serve``."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys

from entrypoint.local.checks import check
from entrypoint.local.model import ARCHITECTURES
from entrypoint.local.plan import Plan, option
from entrypoint.local.stack import Stack
from entrypoint.local.terminal import own_foreground
from patches.framework.errors import EXIT_USAGE, SplintError

__all__ = ["main"]


def _plan(argv: list[str]) -> Plan:
    split = argv.index("--") if "--" in argv else len(argv)
    arguments = tuple(argv[split + 1 :])
    parser = argparse.ArgumentParser(prog="python -m entrypoint.local", description=__doc__)
    parser.add_argument("--model", help=f"a folder, a hub name, or a tiny model: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--launcher", type=shlex.split, help="what takes 'serve MODEL ...'; vllm for stock")
    given = parser.parse_args(argv[:split])
    tiny = given.model is None or given.model in ARCHITECTURES
    return Plan(
        model=None if tiny else given.model,
        architecture=given.model if tiny and given.model else "qwen3_moe",
        port=int(option(arguments, "--port") or given.port),
        arguments=arguments,
        **({"launcher": tuple(given.launcher)} if given.launcher else {}),
    )


def main() -> int:
    """Run the stack; 0 after a requested stop, 2 for a request that can't work, else the engine's own exit code."""
    try:
        plan = _plan(sys.argv[1:])
        check(plan)
    except (SplintError, ValueError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with own_foreground():
            return asyncio.run(Stack(plan).run())
    except SplintError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
