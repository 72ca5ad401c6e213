"""What the image costs over stock: seconds to ready, and memory of each process."""

from __future__ import annotations

import json

import pytest
from support.containers import Start

pytestmark = pytest.mark.full

FLAGS = ("--served-model-name", "tiny", "--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager")
LIMIT_MIB = 64
# The smoke tests have had the patched server at work, so stock is put to the same kind of it.
WORK = """
import openai
client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0)
for length in (8, 64, 512):
    client.completions.create(model="tiny", prompt=list(range(10, 10 + length)), max_tokens=8, logprobs=5)
"""
MEMORY = """
import json
from pathlib import Path
found = {}
for folder in Path("/proc").glob("[0-9]*"):
    try:
        name = (folder / "comm").read_text().strip()
        rollup = (folder / "smaps_rollup").read_text()
    except OSError:
        continue
    words = {line.split()[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    private = words["Private_Clean:"] + words["Private_Dirty:"]
    if private > 20_000:
        found[name] = found.get(name, 0) + private
print(json.dumps(found))
"""


def test_memory_and_time_to_ready_over_stock(start: Start) -> None:
    found = {}
    for mode in ("off", "enforce"):
        server = start("/model", *FLAGS, environ={"SPLINT_MODE": mode})
        seconds = server.wait_healthy()
        server.python(WORK)
        private = json.loads(server.python(MEMORY))
        print(f"{mode}: healthy after {seconds:.1f} s, private KiB {private}")
        found[mode] = private
        server.stop()
    added = {name: (found["enforce"][name] - kib) / 1024 for name, kib in found["off"].items()}
    print(f"MiB over stock: {added}")
    assert set(found["enforce"]) >= set(found["off"])
    assert max(added.values()) < LIMIT_MIB
