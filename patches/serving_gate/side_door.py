"""A private way in for the smoke tests, where the port demands a client certificate that they do not have."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from patches.serving_gate.plan import CheckResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from patches.serving_gate.plan import SmokePlan

__all__ = ["NOT_THE_PORT", "needed", "side_door"]

NOT_THE_PORT = CheckResult(
    "port",
    "the smoke tests go through the real port",
    "skipped",
    0.0,
    "the port demands client certificates; the same application was tested through a private Unix socket",
)


def needed(args: Any) -> bool:
    """Whether the server's port admits only clients with a certificate."""
    return bool(args.ssl_certfile) and args.ssl_cert_reqs == ssl.CERT_REQUIRED


@asynccontextmanager
async def side_door(app: Any, plan: SmokePlan, run_dir: Path) -> AsyncIterator[SmokePlan]:
    """Serve ``app``, gate included, on a socket in the run directory during the block; yields the plan to use it."""
    import uvicorn
    from vllm.entrypoints.launchers.launcher import NoSignalServer

    path = str(run_dir / "smoke.sock")
    server = NoSignalServer(uvicorn.Config(app, uds=path, lifespan="off", log_level="error", access_log=False))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn's own flag
        await asyncio.sleep(0.01)
    root_path = plan.base_url.partition("://")[2].partition("/")[2]
    try:
        yield replace(plan, base_url=f"http://localhost/{root_path}".rstrip("/"), uds=path, ca_file=None)
    finally:
        server.should_exit = True
        await serving
