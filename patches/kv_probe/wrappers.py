"""Two methods that vLLM lacks: one of the engine core, which drives, and one of each worker, which touches memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from patches.framework import rundir
from patches.framework.errors import GateOpenError
from patches.framework.records import Seam

__all__ = ["check_closed", "engine_core", "worker"]


def check_closed() -> None:
    """Refuse every probe but in this node's smoke tests, or for its head where it is headless, whoever asks.

    Raises:
        GateOpenError: nothing says so.
    """
    run_dir = rundir.current()
    phase = ((rundir.read_json(run_dir / rundir.PHASE) if run_dir else None) or {}).get("phase")
    headless = run_dir is not None and phase is None and (run_dir / rundir.HEADLESS).exists()
    if phase != "smoke" and not headless:
        raise GateOpenError(
            f"a control call of the smoke tests in phase {phase!r}",
            "one while the gate is closed",
            "Restart the server to run the smoke tests again; a headless node must not leave out process_roster.",
        )


def engine_core(seam: Seam) -> Callable[..., dict[str, Any]]:
    """``EngineCore.splint_probe(name)``: called as a utility, so that no step runs at the same time."""

    def splint_probe(self: Any, name: str) -> dict[str, Any]:
        seam.count()
        check_closed()
        from patches.kv_probe.probes import run

        return run(self, name)

    return splint_probe


def worker(seam: Seam) -> Callable[..., Any]:
    """``WorkerBase.splint_probe(step, arguments)``: called by the engine core over ``collective_rpc``."""

    def splint_probe(self: Any, step: str, arguments: Mapping[str, Any]) -> Any:
        seam.count()
        check_closed()
        from patches.kv_probe.steps import STEPS

        return STEPS[step](self, **arguments)

    return splint_probe
