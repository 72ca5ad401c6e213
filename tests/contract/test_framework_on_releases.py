"""The patches of a server's start on a release that is not installed: whole, on its own sources."""

from __future__ import annotations

import pytest
from support import releases

EVERY_SERVER = ("process_roster", "serving_gate", "kv_budget", "kv_load_recompute", "kv_profile")
NOT_IMPORTABLE = {"vllm.entrypoints.cli.serve", "vllm.entrypoints.launchers.api_server.entry"}
"""They import orjson, which only 0.33 demands; what stands in them is compared as text."""
CODE = """
import json
from importlib import import_module
from patches.framework import process
application = process.start().application
missing = {}
for module in application.modules():
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        missing[module] = error.name
print(json.dumps({
    "missing": missing,
    "missed": [target.name for target in application.missed()],
    "states": {name: [found.state.value, found.reason] for name, found in application.states.items()},
}))
"""


@pytest.mark.full
def test_what_every_server_carries_goes_onto_0_33_0() -> None:
    found = releases.value("0.33.0", CODE, patches=",".join(EVERY_SERVER))
    assert {name: found["states"][name] for name in EVERY_SERVER} == {name: ["applied", ""] for name in EVERY_SERVER}
    assert found["missed"] == []
    assert set(found["missing"].items()) <= {(module, "orjson") for module in NOT_IMPORTABLE}


@pytest.mark.full
def test_the_installed_sources_of_0_33_0_are_the_reviewed_ones() -> None:
    code = f"""
    from patches.framework import fingerprints, review
    fingerprints.check(review.names("vllm", "0.33.0", {EVERY_SERVER!r}))
    print("true")
    """
    assert releases.value("0.33.0", code, SPLINT_MODE="off") is True
