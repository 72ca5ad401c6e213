"""The seal's sums: what they are, and what makes them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pytest

from patches.framework.errors import EnvironmentRefusedError
from patches.lmcache_admission import seal

pytest.importorskip("awscrt")

CONTENT = bytes(range(256)) * 1024
SEAL = (
    "73706c696e744b560200500001000000000004000000000006d888be3ea2cf8bef03c60f7dd215d8"
    "014d16e3603b08fe00000000000000006b76312d303132333435363738396162d2b1a11cc41f1853"
)
"""Its sums agree with a CRC-32C made bit by bit."""


@pytest.fixture
def fresh() -> Iterator[None]:
    seal._crc32c.cache_clear()
    yield
    seal._crc32c.cache_clear()


def test_seal_is_the_same_bytes_whoever_makes_the_sums() -> None:
    memory = (ctypes.c_ubyte * len(CONTENT)).from_buffer_copy(CONTENT)
    meaning = seal.Meaning(
        key=seal.key_digest(("model", "1", "0", "ab", "")),
        layout=seal.layout_digest((("uint8", (4, 65536)),), "KV_2LTD"),
        groups=1,
        fingerprint="kv1-0123456789ab",
    )
    assert seal.make(meaning, ctypes.addressof(memory), len(CONTENT)).hex() == SEAL


@pytest.mark.usefixtures("fresh")
def test_without_compiled_sums_a_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    with pytest.raises(EnvironmentRefusedError, match="awscrt"):
        seal.check_speed()
