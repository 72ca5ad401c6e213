"""The GPUs as the driver's own tool describes them, read once for all checks."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from entrypoint.checking import CheckFailedError
from entrypoint.preflight.isolated import output

if TYPE_CHECKING:
    from collections.abc import Mapping
    from xml.etree.ElementTree import Element

__all__ = ["Gpu", "Machine", "parse", "read", "visible"]

LIMIT_S = 20.0
_HINT = "Look at nvidia-smi and at the kernel's log (dmesg, NVRM)."


@dataclass(frozen=True)
class Gpu:
    """One GPU. None stands for what it does not report.

    Attributes:
        index: In the order of the PCI bus.
        uuid: ``GPU-…``.
        name: The product's.
        used_mib: Memory that is taken now, by whomever, in MiB.
        free_mib: What is left.
        uncorrected: Uncorrectable memory errors since the driver was loaded.
        remap_pending: Whether a row waits to be remapped at the next reset.
        remap_failed: Whether a row could not be remapped.
        processes: Those that the driver lists, as ``(pid, name, MiB)``; a container sees its own at most.
    """

    index: int
    uuid: str
    name: str
    used_mib: int
    free_mib: int
    uncorrected: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    processes: tuple[tuple[int, str, int], ...]

    @property
    def usable_mib(self) -> int:
        """What programs can have: the driver's own reserve is in the total, but not in what CUDA shows."""
        return self.used_mib + self.free_mib


@dataclass(frozen=True)
class Machine:
    """The driver and its GPUs; ``cuda`` is the CUDA release that the driver brings."""

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]


def read(environ: Mapping[str, str]) -> Machine | None:
    """What ``nvidia-smi`` says, or None where there is no such program.

    Raises:
        CheckFailedError: it hangs, fails, or says something else than it used to.
    """
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return None
    return parse(output((program, "-q", "-x"), limit_s=LIMIT_S, environ=dict(environ), hint=_HINT))


def parse(text: str) -> Machine:
    """Read the XML of ``nvidia-smi -q -x``.

    Raises:
        CheckFailedError: it is something else.
    """
    try:
        log = ET.fromstring(text)  # noqa: S314 - the driver's tool wrote it
        gpus = tuple(_gpu(index, node) for index, node in enumerate(log.iter("gpu")))
    except (ET.ParseError, ValueError) as error:
        raise CheckFailedError(f"an answer of nvidia-smi that can't be read ({error})", "its XML", _HINT) from error
    return Machine(log.findtext("driver_version", ""), log.findtext("cuda_version", ""), gpus)


def _gpu(index: int, node: Element) -> Gpu:
    return Gpu(
        index=index,
        uuid=node.findtext("uuid", ""),
        name=node.findtext("product_name", ""),
        used_mib=_mib(node.findtext("fb_memory_usage/used", "")),
        free_mib=_mib(node.findtext("fb_memory_usage/free", "")),
        uncorrected=_uncorrected(node),
        remap_pending=_yes(node.findtext("remapped_rows/remapped_row_pending")),
        remap_failed=_yes(node.findtext("remapped_rows/remapped_row_failure")),
        processes=tuple(_process(found) for found in node.iter("process_info")),
    )


def _mib(text: str) -> int:
    """Raises ValueError where the text is no number of MiB."""
    return int(text.removesuffix("MiB"))


def _uncorrected(node: Element) -> int | None:
    """All counters of uncorrectable errors together: generations of GPUs name them differently."""
    volatile = node.find("ecc_errors/volatile")
    counted = [
        int(counter.text or "")
        for counter in (volatile.iter() if volatile is not None else ())
        if "uncorrectable" in counter.tag and re.fullmatch(r"\d+", counter.text or "")
    ]
    return sum(counted) if counted else None


def _yes(text: str | None) -> bool | None:
    return {"yes": True, "no": False}.get((text or "").lower())


def _process(node: Element) -> tuple[int, str, int]:
    used = node.findtext("used_memory", "")
    return int(node.findtext("pid", "0")), node.findtext("process_name", ""), _mib(used) if "MiB" in used else 0


def visible(machine: Machine, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; all where it names parts of a GPU (MIG)."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or "MIG" in named:
        return machine.gpus
    found = [_named(machine, name.strip()) for name in named.split(",") if name.strip()]
    return tuple(gpu for gpu in found if gpu is not None)


def _named(machine: Machine, name: str) -> Gpu | None:
    if name.isdecimal():
        return machine.gpus[int(name)] if int(name) < len(machine.gpus) else None
    return next((gpu for gpu in machine.gpus if gpu.uuid.startswith(name)), None)
