"""Which engines may share KV: every case, by the keys that real vLLM and LMCache code makes for writer and reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.kv_identity import CASES

TESTS = Path(__file__).parents[1]
BYPASS = "prompt embeddings of equal length"
REFUSED = "scales computed at run time (calculate_kv_scales)"


def keys(folder: Path, seed: str, *numbers: int) -> Any:
    """The keys of the numbered or else of all cases, made in a fresh interpreter with the patches on."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_", "LMCACHE_"))}
    ended = subprocess.run(
        [sys.executable, "-m", "support.kv_identity", str(folder), *map(str, numbers)],
        env={
            **kept, "PYTHONHASHSEED": seed, "SPLINT_PATCHES": "kv_profile,lmcache_identity", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")])),
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def of_all_cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return keys(tmp_path_factory.mktemp("keys") / "one", "1")


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["what"] for case in CASES])
def test_engines_share_what_they_may_and_nothing_else(of_all_cases: Any, number: int) -> None:
    case, (writer, *readers) = CASES[number], of_all_cases[number]
    if case["what"] == BYPASS:
        assert [writer, *readers] == [None, None]
    elif case["what"] == REFUSED:
        assert writer is None
        assert "calculate_kv_scales" in readers[0]
    elif case["share"]:
        assert set(readers) == {writer}
    else:
        assert len({writer, *readers}) == 1 + len(readers)


def test_keys_are_the_same_in_another_process_with_another_hash_seed(
    of_all_cases: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In another folder too: what differs by path alone is the model's own copy, whose name stands in its keys."""
    some = range(0, len(CASES), 5)
    again = keys(tmp_path_factory.mktemp("keys") / "one", "random", *some)
    for first, second in zip((of_all_cases[number] for number in some), again, strict=True):
        assert [_without_path(key) for key in first] == [_without_path(key) for key in second]


def _without_path(key: str | None) -> str | None:
    return key and key.partition("-kv1-")[2]


def test_every_key_is_a_file_name_that_file_systems_take(of_all_cases: Any) -> None:
    names = {key for found in of_all_cases for key in found if key and key.endswith(".data")}
    assert len(names) > 20
    assert all(len(name.encode()) <= 255 and "/" not in name for name in names)
