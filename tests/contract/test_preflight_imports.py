"""What the preflight's checks share is imported before they run side by side; else two of them can wait for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
import json, sys
from entrypoint.preflight import runner
waiting = lambda: any(type(finder).__name__ == "_FirstLook" for finder in sys.meta_path)
before = waiting()
list(runner.run(None, ()))
print(json.dumps([before, waiting(), "packaging.specifiers" in sys.modules, "patches.framework.hooks" in sys.modules]))
"""


def test_the_hooks_and_what_they_need_are_there_before_the_first_check_starts() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_"))}
    ended = subprocess.run(
        [sys.executable, "-c", CODE], env=kept, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(ended.stdout.splitlines()[-1]) == [True, False, True, True]
