"""What was reviewed in the CPU wheels stands in the CUDA wheels of the same releases, word for word."""

from __future__ import annotations

import pytest
from support import releases

from patches.framework import fingerprints, rundir

REVIEWED = [
    version for version in releases.locked("vllm") if (fingerprints.REVIEWED_FOLDER / f"vllm-{version}.json").is_file()
]


def test_the_default_release_and_that_of_vllm_47722_are_compared() -> None:
    assert {"0.25.1", "0.32.0"} <= set(REVIEWED)


@pytest.mark.full
@pytest.mark.parametrize("release", REVIEWED)
def test_every_reviewed_function_is_the_same_in_the_cuda_wheel(release: str) -> None:
    reviewed = rundir.read_json(fingerprints.REVIEWED_FOLDER / f"vllm-{release}.json")
    assert reviewed is not None
    code = f"""
    import json
    from patches.framework import fingerprints
    print(json.dumps(fingerprints.take({tuple(reviewed["targets"])!r})["targets"]))
    """
    taken = releases.value(release, code, distribution="vllm", SPLINT_MODE="off")
    assert taken == reviewed["targets"]
