"""The default of ``kv_load_failure_policy`` on vLLM's own configuration class, however it is set."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

APPLIED = """
import sys
import vllm.config.utils as utils
from patches.framework.records import Seam
from patches.kv_load_recompute.wrappers import config
if "vllm.config.kv_transfer" in sys.modules:  # the package imports all of its configuration at once
    import importlib
    module = sys.modules["vllm.config.kv_transfer"]
    original = getattr(utils.config, "__wrapped__", utils.config)
    utils.config = config(Seam("vllm.config.utils:config", original, lambda: None))
    importlib.reload(module)
"""
READ = """
from pydantic import TypeAdapter
from vllm.config.kv_transfer import KVTransferConfig as Config
given = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
for policy in (None, "fail", "recompute"):
    values = given if policy is None else {**given, "kv_load_failure_policy": policy}
    print(Config(**values).kv_load_failure_policy, TypeAdapter(Config).validate_python(values).kv_load_failure_policy)
"""


def read(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout.split()[-6:]


def test_default_is_recompute_and_what_is_set_still_wins() -> None:
    assert read(APPLIED + READ) == ["recompute", "recompute", "fail", "fail", "recompute", "recompute"]


def test_without_the_patch_the_default_is_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINT_MODE", "off")
    assert read(READ)[:2] == ["fail", "fail"]
