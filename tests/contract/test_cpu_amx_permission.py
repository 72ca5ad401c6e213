"""The AMX tile permission of CPU workers.

On a machine with AMX the kernel's own record is read before and after; on one without, the condition has to say so, and
the seam is tested with torch's question to the kernel observed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from patches.cpu_amx_permission import wrappers
from patches.framework.errors import RefusedError
from patches.framework.records import Seam

AMX = torch.cpu._is_amx_tile_supported()
TILE_DATA = 18
"""Bit of the AMX tile registers in the kernel's permission mask (``XFEATURE_XTILEDATA``)."""

PERMISSION = """
import ctypes, sys
mask = ctypes.c_uint64()
def permitted():
    ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask))  # arch_prctl(ARCH_GET_XCOMP_PERM)
    return bool(mask.value >> int(sys.argv[1]) & 1)
from patches.cpu_amx_permission.wrappers import init_device
from patches.framework.records import Seam
before = permitted()
init_device(Seam("init_device", lambda worker: print(before, permitted()), lambda: None))(None)
"""


@pytest.fixture
def happened() -> list[str]:
    return []


@pytest.fixture
def init_device(happened: list[str]) -> Callable[[object], None]:
    """The wrapper around an ``init_device`` that notes its call; it notes its own count."""
    seam = Seam("init_device", lambda _: happened.append("init_device"), lambda: happened.append("counted"))
    return wrappers.init_device(seam)


def answer(monkeypatch: pytest.MonkeyPatch, happened: list[str], *, granted: bool) -> None:
    """Let torch's question to the kernel be noted, and answer it."""

    def ask() -> bool:
        happened.append("asked")
        return granted

    monkeypatch.setattr(torch.cpu, "_init_amx", ask)


def test_the_condition_names_the_reason_on_a_cpu_without_amx() -> None:
    assert wrappers.needs_permission() == (None if AMX else "this CPU has no AMX tiles")


def test_the_permission_is_asked_for_before_the_worker_sets_up_its_device(
    monkeypatch: pytest.MonkeyPatch, happened: list[str], init_device: Callable[[object], None]
) -> None:
    answer(monkeypatch, happened, granted=True)
    init_device(None)
    assert happened == ["counted", "asked", "init_device"]


def test_a_refused_permission_ends_the_start_instead_of_the_first_request(
    monkeypatch: pytest.MonkeyPatch, happened: list[str], init_device: Callable[[object], None]
) -> None:
    answer(monkeypatch, happened, granted=False)
    with pytest.raises(RefusedError, match=r"Allow the system call arch_prctl.*Linux 5\.16") as caught:
        init_device(None)
    assert "SIGILL" in caught.value.wanted
    assert "init_device" not in happened


@pytest.mark.skipif(AMX, reason="the kernel grants the permission on this machine")
def test_torch_asks_the_kernel_and_hears_no_where_there_is_no_amx(init_device: Callable[[object], None]) -> None:
    with pytest.raises(wrappers.AmxPermissionError):
        init_device(None)


@pytest.mark.skipif(not AMX, reason="this CPU has no AMX tiles")
def test_the_kernel_records_the_permission() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PERMISSION, str(TILE_DATA)], capture_output=True, text=True, check=True, timeout=120
    )
    assert ended.stdout.split() == ["False", "True"]
