"""What the machine must have, checked before minutes are spent. A check returns what is missing, or None."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["PYTHON_VERSION", "find_python", "has_nvidia_gpu", "problems"]

PYTHON_VERSION = (3, 11)
"""The one Python that the locks are made for."""

GIB = 1024**3
DISK_BYTES = {"cpu": 6 * GIB, "cuda": 20 * GIB}
MEMORY_BYTES = 2 * GIB
"""To install; what serving takes is checked when the server is started."""


def problems(flavour: str, folder: Path) -> list[str]:
    """Everything that is missing to make an environment of ``flavour`` (``cpu`` or ``cuda``) in ``folder``."""
    found = [_platform(), _memory(), _disk(folder, DISK_BYTES[flavour])]
    if flavour == "cpu":
        found += [_avx512(Path("/proc/cpuinfo")), _numa()]
    return [problem for problem in found if problem]


def find_python() -> str | None:
    """Path of an interpreter of :data:`PYTHON_VERSION` that can make environments, or None.

    ``PYTHON`` in the environment is tried first, then the running interpreter, the one on ``PATH``, and uv's.
    """
    name = "python" + ".".join(map(str, PYTHON_VERSION))
    candidates = [os.environ.get("PYTHON"), sys.executable, shutil.which(name), f"/usr/bin/{name}"]
    usable = (path for path in candidates if path and _can_make_environments(path))
    return next(usable, None) or _python_of_uv(name)


def _can_make_environments(path: str) -> bool:
    test = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {PYTHON_VERSION})"
    try:
        return subprocess.run([path, "-c", test], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def _python_of_uv(name: str) -> str | None:
    if shutil.which("uv") is None:
        return None
    found = subprocess.run(["uv", "python", "find", name], check=False, capture_output=True, text=True)
    path = found.stdout.strip()
    return path if found.returncode == 0 and _can_make_environments(path) else None


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout


def _platform() -> str | None:
    system, machine = platform.system(), platform.machine()
    if (system, machine) == ("Linux", "x86_64"):
        return None
    return f"This is {system} on {machine}; the locked packages are for Linux on x86_64."


def _avx512(cpuinfo: Path) -> str | None:
    flags = next((line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("flags")), "")
    if "avx512f" in flags.split():
        return None
    return "The CPU has no AVX-512, which vLLM's CPU build needs: use a machine with it (grep avx512f /proc/cpuinfo)."


def _numa() -> str | None:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return "libnuma.so.1 is missing: install it (Debian, Ubuntu: apt-get install libnuma1)."
    return None


def _memory() -> str | None:
    available = available_memory()
    if available >= MEMORY_BYTES:
        return None
    return f"{available / GIB:.1f} GiB of memory are free; the set-up needs {MEMORY_BYTES / GIB:.0f}: end something."


def available_memory() -> int:
    """Bytes of memory that can still be had, within the control group's limit."""
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo}
    return min(fields["MemAvailable"], _control_group_limit())


def _control_group_limit() -> int:
    """Bytes that this control group may still take; without a limit, more than any machine has."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        return limit - int((group / "memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return sys.maxsize


def _disk(folder: Path, wanted: int) -> str | None:
    free = shutil.disk_usage(folder).free
    if free >= wanted:
        return None
    return f"{free / GIB:.1f} GiB of disk are free at {folder}; the environment needs {wanted / GIB:.0f}: make room."
