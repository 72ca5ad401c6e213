"""The device checks, on what ``nvidia-smi`` says of healthy and of sick GPUs, and their probes on the CPU.

No GPU was at hand: the descriptions are made up in the driver's format.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrypoint.checking import CheckFailedError, DoesNotApplyError
from entrypoint.preflight import isolated, nvidia
from entrypoint.preflight.checks import allreduce, driver, ecc, foreign, lmcache_ops, matmul, memlock, memory
from entrypoint.preflight.subject import Subject
from patches.framework.arguments import Arguments

GPU = """<gpu id="00000000:17:00.0">
  <product_name>NVIDIA H200</product_name><uuid>GPU-{index}-abc</uuid>
  <fb_memory_usage><total>143771 MiB</total><used>{used} MiB</used><free>{free} MiB</free></fb_memory_usage>
  <ecc_errors>
    <volatile>
      <sram_correctable>2</sram_correctable><sram_uncorrectable_parity>{sram}</sram_uncorrectable_parity>
      <dram_uncorrectable>{uncorrected}</dram_uncorrectable>
    </volatile>
    <aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate>
  </ecc_errors>
  <remapped_rows>
    <remapped_row_pending>{pending}</remapped_row_pending><remapped_row_failure>{failure}</remapped_row_failure>
  </remapped_rows>
  <processes>{processes}</processes>
</gpu>"""
HEALTHY: dict[str, Any] = {
    "used": 4, "free": 143100, "uncorrected": 0, "sram": 0, "pending": "No", "failure": "No", "processes": "",
}  # fmt: skip
PROCESS = (
    "<process_info><pid>77</pid><type>C</type><process_name>python</process_name>"
    "<used_memory>9000 MiB</used_memory></process_info>"
)

MakeSubject = Callable[..., Subject]


def description(*gpus: dict[str, Any], cuda: str = "13.0") -> str:
    body = "".join(GPU.format(index=index, **{**HEALTHY, **gpu}) for index, gpu in enumerate(gpus))
    head = f"<driver_version>580.1</driver_version><cuda_version>{cuda}</cuda_version>"
    return f"<nvidia_smi_log>{head}{body}</nvidia_smi_log>"


@pytest.fixture
def on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSubject:
    """A subject on a machine whose ``nvidia-smi`` prints the given description."""

    def make(
        *gpus: dict[str, Any], words: tuple[str, ...] = (), script: str = "", cuda: str = "13.0", **env: str
    ) -> Subject:
        (tmp_path / "gpus.xml").write_text(description(*gpus, cuda=cuda))
        tool = tmp_path / "nvidia-smi"
        tool.write_text(script or f"#!/bin/sh\n[ \"$*\" = '-q -x' ] && exec cat {tmp_path}/gpus.xml\n")
        tool.chmod(0o755)
        monkeypatch.setattr("entrypoint.preflight.subject.installed_version", lambda _: "0.32.0")
        return Subject(Arguments(["m", *words]), {"PATH": f"{tmp_path}:/usr/bin:/bin", **env})

    return make


def test_healthy_gpus_pass_what_is_read(on_gpus: MakeSubject) -> None:
    subject = on_gpus({}, {})
    assert subject.no_gpu is None
    for check in (ecc.CHECK, memory.CHECK, foreign.CHECK):
        assert check.applies(subject) is None
        check.run(subject)


@pytest.mark.parametrize(
    ("sick", "named"),
    [
        ({"uncorrected": 3}, "GPU 1 (GPU-1-abc): 3 uncorrectable memory errors"),
        ({"pending": "Yes"}, "GPU 1 (GPU-1-abc): a row that waits to be remapped"),
        ({"failure": "Yes"}, "GPU 1 (GPU-1-abc): a row that could not be remapped"),
    ],
)
def test_bad_memory_names_its_gpu(on_gpus: MakeSubject, sick: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckFailedError) as failure:
        ecc.CHECK.run(on_gpus({}, sick))
    assert failure.value.found == named


def test_gpus_without_error_counters_are_skipped(on_gpus: MakeSubject) -> None:
    with pytest.raises(DoesNotApplyError):
        ecc.CHECK.run(on_gpus({"uncorrected": "N/A", "sram": "N/A", "pending": "N/A", "failure": "N/A"}))


def test_too_little_free_memory_is_found_before_the_model_is_loaded(on_gpus: MakeSubject) -> None:
    with pytest.raises(CheckFailedError, match=r"GPU 1: 100000 MiB free of 143104; wanted 0\.92"):
        memory.CHECK.run(on_gpus({}, {"free": 100000, "used": 43104}, words=("-tp", "2")))


@pytest.mark.parametrize("words", [("-tp", "2", "--gpu-memory-utilization", "0.6"), ("-tp", "1")])
def test_memory_that_the_server_does_not_ask_for_may_be_taken(on_gpus: MakeSubject, words: tuple[str, ...]) -> None:
    memory.CHECK.run(on_gpus({}, {"free": 100000, "used": 43104}, words=words))


@pytest.mark.parametrize(
    ("gpu", "named"),
    [
        ({"processes": PROCESS}, "python (pid 77, 9000 MiB)"),
        ({"used": 9004}, "9004 MiB of processes that are not visible"),
    ],
)
def test_a_neighbour_is_named_as_far_as_it_is_visible(on_gpus: MakeSubject, gpu: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckFailedError) as failure:
        foreign.CHECK.run(on_gpus(gpu))
    assert named in failure.value.found
    assert foreign.CHECK.severity == "warn"


@pytest.mark.parametrize(
    ("named", "indices"), [("1", [1]), ("1,0", [1, 0]), ("GPU-1", [1]), ("MIG-x", [0, 1]), ("7", [])]
)
def test_only_visible_gpus_are_looked_at(on_gpus: MakeSubject, named: str, indices: list[int]) -> None:
    subject = on_gpus({}, {}, CUDA_VISIBLE_DEVICES=named)
    assert [gpu.index for gpu in subject.gpus] == indices
    assert (subject.no_gpu is None) is bool(indices)


@pytest.mark.parametrize(
    ("driver_cuda", "torch_cuda", "fits"), [("13.0", "12.9", True), ("12.4", "12.9", True), ("12.9", "13.0", False)]
)
def test_the_driver_must_be_of_torchs_major_release(
    on_gpus: MakeSubject, monkeypatch: pytest.MonkeyPatch, driver_cuda: str, torch_cuda: str, fits: bool
) -> None:
    monkeypatch.setattr(driver, "COMPATIBLE", Path("/no/such/folder"))
    monkeypatch.setattr(driver, "torch_build", lambda: ("2.13.0+cu", torch_cuda))
    subject = on_gpus({}, cuda=driver_cuda)
    if fits:
        driver.CHECK.run(subject)
        return
    with pytest.raises(CheckFailedError, match=r"brings CUDA 12\.9, under torch 2\.13\.0"):
        driver.CHECK.run(subject)


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("#!/bin/sh\necho 'NVML: Driver/library version mismatch' >&2; exit 18\n", "Driver/library version mismatch"),
        ("#!/bin/sh\necho nonsense\n", "can't be read"),
    ],
)
def test_a_driver_that_does_not_answer_fails_its_check_and_skips_the_rest(
    on_gpus: MakeSubject, script: str, named: str
) -> None:
    subject = on_gpus(script=script)
    with pytest.raises(CheckFailedError, match=named):
        driver.CHECK.run(subject)
    assert ecc.CHECK.applies(subject) == "the driver can't be read"


def test_a_driver_that_hangs_is_left_behind(on_gpus: MakeSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "LIMIT_S", 0.3)
    start = time.monotonic()
    subject = on_gpus(script="#!/bin/sh\nsleep 60\n")
    assert time.monotonic() - start < 30
    assert "no end after 0.3 s; killed" in str(subject.unreadable)


def test_locked_memory_matters_to_servers_with_a_connector(on_gpus: MakeSubject) -> None:
    assert memlock.CHECK.applies(on_gpus({})) == "no KV connector and one node"
    assert (
        memlock.CHECK.applies(on_gpus({}, words=("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'))) is None
    )


def test_lmcache_without_operations_for_gpus_is_refused(on_gpus: MakeSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.preflight.packages.native", lambda *_: [])
    with pytest.raises(CheckFailedError, match="without operations for GPUs"):
        lmcache_ops.CHECK.run(on_gpus({}))


@pytest.mark.parametrize(
    ("vllm", "why"), [("0.32.0+cpu", "vLLM 0.32.0+cpu is a CPU build"), ("0.32.0", "this machine has no NVIDIA GPU")]
)
def test_without_a_gpu_the_device_checks_are_skipped_with_that_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vllm: str, why: str
) -> None:
    monkeypatch.setattr("entrypoint.preflight.subject.installed_version", lambda _: vllm)
    monkeypatch.setattr("entrypoint.preflight.subject.DEVICES", tmp_path)
    subject = Subject(Arguments(["m"]), {"PATH": str(tmp_path)})
    for check in (driver.CHECK, ecc.CHECK, memory.CHECK, foreign.CHECK, matmul.CHECK, memlock.CHECK):
        assert check.applies(subject) == why


def test_a_container_without_the_drivers_tool_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("entrypoint.preflight.subject.DEVICES", tmp_path)
    monkeypatch.setattr("entrypoint.preflight.subject.installed_version", lambda _: "0.32.0")
    assert "utility capability" in (Subject(Arguments(["m"]), {"PATH": str(tmp_path)}).no_gpu or "")


def sabotaged(folder: Path, code: str, *words: str) -> Subject:
    """A subject whose probes run ``code`` when their interpreter starts."""
    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return Subject(Arguments(["m", *words]), {**os.environ, "PYTHONPATH": path})


def test_a_right_product_passes(tmp_path: Path) -> None:
    assert matmul.one(sabotaged(tmp_path, ""), "cpu")["wrong"] == 0


def test_a_product_with_one_wrong_cell_is_refused(tmp_path: Path) -> None:
    code = """
import torch
right = torch.Tensor.__matmul__
def wrong(a, b):
    product = right(a, b)
    if product.dtype == torch.bfloat16:
        product[3, 5] += 1
    return product
torch.Tensor.__matmul__ = wrong
"""
    with pytest.raises(CheckFailedError, match="cpu: 1 of 1048576 cells wrong, 0 not finite"):
        matmul.one(sabotaged(tmp_path, code), "cpu")


def test_exact_sums_over_processes_pass(tmp_path: Path) -> None:
    subject = sabotaged(tmp_path, "", "-dp", "3")
    assert allreduce.CHECK.applies(subject) is None
    assert allreduce.CHECK.run(subject)["processes"] == 3


def test_one_wrong_sum_names_its_rank(tmp_path: Path) -> None:
    code = """
import torch.distributed as d
right = d.all_reduce
def wrong(tensor):
    right(tensor)
    tensor[7] += d.get_rank()
d.all_reduce = wrong
"""
    with pytest.raises(CheckFailedError, match=r"wrong sums on rank\(s\) \[1\]"):
        allreduce.CHECK.run(sabotaged(tmp_path, code, "-dp", "2"))


def test_a_rank_that_breaks_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    code = """
import torch.distributed as d
right = d.init_process_group
def breaks(*args, rank, **kwargs):
    if rank == 1:
        raise OSError("no such interface")
    right(*args, rank=rank, **kwargs)
d.init_process_group = breaks
"""
    start = time.monotonic()
    with pytest.raises(CheckFailedError, match="no such interface"):
        allreduce.CHECK.run(sabotaged(tmp_path, code, "-dp", "2"))
    assert time.monotonic() - start < allreduce.LIMIT_S / 2


def test_one_worker_has_nobody_to_add_up_with() -> None:
    assert allreduce.CHECK.applies(Subject(Arguments(["m"]), {})) == "one worker"
    assert allreduce.CHECK.applies(Subject(Arguments(["m"]), {}, thorough=True)) is None


def ended(pid: int, within_s: float) -> bool:
    """Whether the process is gone, or goes in time."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], within_s)[0])
    finally:
        os.close(watched)


def test_a_wedged_probe_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "LIMIT_S", 5.0)
    code = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    with pytest.raises(CheckFailedError, match="cpu: no end after 5 s; killed"):
        matmul.one(sabotaged(tmp_path, code), "cpu")
    assert ended(int((tmp_path / "pid").read_text()), within_s=30)


def test_a_probe_that_says_nothing_has_failed(tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match="no answer of the probe"):
        matmul.one(sabotaged(tmp_path, "import os; os._exit(0)"), "cpu")


def test_a_program_that_is_absent_has_failed() -> None:
    with pytest.raises(CheckFailedError, match="/absent: No such file"):
        isolated.output(("/absent",), limit_s=1, environ={}, hint="")
