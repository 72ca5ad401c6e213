"""``docker compose --profile two-node up``: a head and a headless node, a data-parallel rank each, with EP."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.containers import Compose, docker, wait_until
from support.servers import free_port

Nodes = Callable[..., Compose]


@pytest.fixture
def nodes(images: Any) -> Nodes:
    """Compose with the profile, its containers left as they ended: ``nodes(FILE, ...)``."""
    assert docker("image", "inspect", images.cpu)

    def nodes(*files: str) -> Compose:
        names = {"COMPOSE_PROJECT_NAME": "splint-nodes", "RESTART": "no", "PORT": str(free_port())}
        return Compose(("two-node",), names, files)

    return nodes


def _url(compose: Compose) -> str:
    return f"http://127.0.0.1:{compose.environ['PORT']}"


def test_two_nodes_serve_with_one_budget_and_the_death_of_one_ends_the_other(nodes: Nodes) -> None:
    compose = nodes()
    start = time.monotonic()
    with compose.up():
        print(f"both nodes healthy after {time.monotonic() - start:.1f} s")
        report = httpx.get(f"{_url(compose)}/splint/report", timeout=20).json()
        checks = {check["id"]: check for check in report["verdict"]["checks"]}
        assert report["verdict"]["status"] == "passed"
        assert checks["kv_budget"]["status"] == "passed"
        # By the counters of each rank, so the other container's has answered itself.
        assert checks["dp_ranks"]["evidence"]["ranks"].keys() == {"0", "1"}
        print(f"budget: {checks['kv_budget']['evidence']}")
        with openai.OpenAI(base_url=f"{_url(compose)}/v1", api_key="none", max_retries=0, timeout=60) as client:
            for rank in ("0", "1"):
                answer = client.completions.create(
                    model="tiny-moe", prompt="a splint", max_tokens=4, extra_headers={"X-data-parallel-rank": rank}
                )
                assert answer.choices[0].text is not None

        docker("kill", compose.service("node").id)
        killed = time.monotonic()
        closed = wait_until(lambda: not _ready(_url(compose)), "closed", 30)
        code = compose.service("head").wait_end(90)
        print(
            f"/readyz closed after {closed:.1f} s, the head ended with {code} after {time.monotonic() - killed:.1f} s"
        )
        assert closed <= 10
        assert code != 0


OTHER_IMAGE = """
FROM vllm-splint:cpu
RUN echo '# another' >> "$(python3 -c 'import patches.kv_budget.shares as found; print(found.__file__)')"
"""
OTHER_NODE = "services: {node: {image: vllm-splint:other}}"


@pytest.mark.full
def test_a_node_with_another_patch_set_is_refused_by_name(nodes: Nodes, tmp_path: Path) -> None:
    docker("build", "--network=host", "-t", "vllm-splint:other", "-", stdin=OTHER_IMAGE)
    override = tmp_path / "other.yaml"
    override.write_text(OTHER_NODE, encoding="utf-8")
    compose = nodes(str(override))
    with compose.up(wait=False):
        codes = [compose.service(name).wait_end(240) for name in ("head", "node")]
        said = compose.service("head").logs(2000)
    told = [line for line in said.splitlines() if "patch_set" in line]
    print("\n".join(told[:3]))
    assert codes == [78, 78]
    assert any("DP1" in line for line in told)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
