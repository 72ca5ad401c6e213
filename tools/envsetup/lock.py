"""Regenerates the lock files: ``make lock`` keeps the versions that still fit, ``make lock UPGRADE=1`` moves them.

pip resolves each ``.in`` file for the interpreter and platform that runs this, and reports versions and digests. So it
must run on what the locks are for: CPython 3.11 on Linux x86-64, where pip finds the CPU build of torch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from envsetup import lockfile
from envsetup.lockfile import Pin
from envsetup.machine import PYTHON_VERSION

__all__ = ["main"]

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
# The package index has these for CUDA only; beside the CPU build of torch they break at import.
BROKEN_BESIDE_CPU_TORCH = frozenset({"torchaudio", "torchcodec", "torchvision"})


def _resolve(source: Path, keep: dict[str, Pin]) -> list[Pin]:
    """What pip would install for ``source`` into an empty environment, preferring the versions in ``keep``."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{pin.requirement}\n" for pin in keep.values()), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary", ":all:", "--report", str(report), "-c", str(constraints), "-r", str(source)]
        finished = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
        if finished.returncode != 0:
            errors = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")]
            raise SystemExit(f"{source.name} does not resolve:\n" + "\n".join(errors))
        return [_pin(item) for item in json.loads(report.read_text(encoding="utf-8"))["install"]]


def _pin(item: dict[str, dict[str, object]]) -> Pin:
    """A pin from one entry of pip's installation report."""
    archive = item["download_info"]["archive_info"]
    hashes = archive["hashes"] if isinstance(archive, dict) else {}
    return Pin(str(item["metadata"]["name"]), str(item["metadata"]["version"]), (f"sha256:{hashes['sha256']}",))


def _write(name: str, pins: list[Pin]) -> dict[str, Pin]:
    python = ".".join(map(str, PYTHON_VERSION))
    header = f"Made by `make lock` from {name}.in for CPython {python} on Linux x86-64.\n"
    header += "Install with --no-deps --require-hashes."
    (REQUIREMENTS / f"{name}.lock").write_text(lockfile.render(pins, header), encoding="utf-8")
    print(f"requirements/{name}.lock: {len(pins)} distributions", flush=True)
    return {lockfile.canonical(pin.name): pin for pin in pins}


def _lock(name: str, keep: dict[str, Pin], drop: frozenset[str] = frozenset()) -> dict[str, Pin]:
    print(f"resolving {name}.in", flush=True)
    pins = _resolve(REQUIREMENTS / f"{name}.in", keep)
    return _write(name, [pin for pin in pins if lockfile.canonical(pin.name) not in drop])


def main() -> None:
    """Write cpu.lock, cuda.lock, dev.lock and sbom.lock."""
    parser = argparse.ArgumentParser(prog="make lock", description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="move every version that is not pinned in an .in file")
    upgrade = parser.parse_args().upgrade
    kept = {
        name: {} if upgrade else lockfile.read(REQUIREMENTS / f"{name}.lock") for name in ("cpu", "cuda", "dev", "sbom")
    }
    cpu = _lock("cpu", kept["cpu"], BROKEN_BESIDE_CPU_TORCH)
    cuda = _lock("cuda", kept["cuda"])
    # What both stacks bring is theirs to choose; dev.lock adds only the rest.
    _lock("dev", {**kept["dev"], **cpu}, frozenset(cpu.keys() & cuda.keys()))
    _lock("sbom", kept["sbom"])


if __name__ == "__main__":
    main()
