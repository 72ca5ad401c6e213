"""The first import of vLLM imports the hooks; another thread may be importing one of their modules just then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The hooks import `shared`, which another thread has begun to import and finishes only with the global import lock.
CODE = """
import sys, threading
first = next(finder for finder in sys.meta_path if type(finder).__name__ == "_FirstLook")
known = type(first).find_spec.__globals__
install = known["_install"]

def install_and_share(library):
    begun.set()
    import shared
    install(library)

known["_install"] = install_and_share
sys.begun = begun = threading.Event()
sys.entered = entered = threading.Event()
other = threading.Thread(target=lambda: __import__("shared"), daemon=True)
other.start()
entered.wait()
import LIBRARY
other.join()
print("waiting" if first in sys.meta_path else "hooked", "patches.framework.hooks" in sys.modules)
"""
SHARED = """
import sys
sys.entered.set()
sys.begun.wait()
import shared_more
"""


@pytest.mark.parametrize("library", ["vllm", "lmcache"])
def test_a_thread_that_imports_what_the_hooks_need_does_not_stop_the_first_import(tmp_path: Path, library: str) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    (tmp_path / "shared_more.py").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_"))}
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-c", CODE.replace("LIBRARY", library)], env={**kept, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.stdout.split() == ["hooked", "True"], ended.stderr[-2000:]


def test_looking_for_a_library_without_importing_it_costs_nothing_and_finds_its_own_spec() -> None:
    code = """
import importlib.util, sys
spec = importlib.util.find_spec("vllm")
print(spec.origin.endswith("vllm/__init__.py"), spec.loader.is_package("vllm"), "wrapt" in sys.modules)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_"))}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=240, check=True
    )
    assert ended.stdout.split() == ["True", "True", "False"]
