"""Drop-in: the image is started the ways that the stock image is, and behaves as users of the stock image expect."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from support.containers import Container, Start, wait_until
from support.servers import free_port

FLAGS = (
    "--served-model-name",
    "tiny",
    "--max-model-len",
    "2048",
    "--dtype",
    "bfloat16",
    "--enforce-eager",
    "--max-num-seqs",
    "8",
)

# Long, since a first prompt of a few tokens ends stock's engine on a CPU with AMX (`cpu_amx_permission`).
ASK = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
client.completions.create(model="tiny", prompt="a splint " * 20, max_tokens=4)
print(client.models.list().data[0].id)
"""
EMBED = """
import httpx
answer = httpx.post("http://127.0.0.1:8000/v1/embeddings", json={"model": "tiny", "input": "a splint"})
print(answer.status_code, answer.json())
"""
# Stock's words: the test of stock mode asks it, too.
EMBEDDINGS_REFUSED = "404 {'detail': 'Not Found'}"
TLS = """
import ssl, sys, httpx
client = httpx.Client(verify=ssl.create_default_context(cafile=sys.argv[1]))
key = {"Authorization": "Bearer " + sys.argv[2]}
for path, headers in ("/v1/models", {}), ("/v1/models", key), ("/models/v1/models", key), ("/readyz", {}):
    print(client.get("https://localhost:8000" + path, headers=headers).status_code)
"""
KILL_AN_ENGINE = """
import os, signal
from pathlib import Path
names = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/comm")}
os.kill(next(pid for pid, name in names.items() if "EngineCor" in name), signal.SIGKILL)
"""
UDS = """
import sys, httpx
print(httpx.Client(transport=httpx.HTTPTransport(uds=sys.argv[1])).get("http://server/v1/models").status_code)
"""


def _ask(server: Container, url: str = "http://127.0.0.1:8000") -> str:
    return server.python(ASK, url)


def _report(server: Container, url: str = "http://127.0.0.1:8000") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.execute("splint", "report", "--base-url", url, "--json"))
    return found


def test_any_user_of_group_0_with_a_read_only_root_file_system(start: Start) -> None:
    port = free_port()
    server = start(
        "/model", *FLAGS,
        options=("--user", "4711:0", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/root/.cache:mode=0775",
                 "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--publish", f"127.0.0.1:{port}:8000"),
    )  # fmt: skip
    print(f"healthy after {server.wait_healthy():.1f} s")
    assert "8000" in server.logs(400)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model="tiny", prompt="a splint", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    assert server.execute("id", "-u") == "4711"
    code, seconds = server.stop()
    print(f"docker stop: code {code} after {seconds:.1f} s")
    assert code == 0


@pytest.mark.full
class TestFormsOfStart:
    """Each ends with a check of what the form is for."""

    def test_model_as_a_flag(self, start: Start) -> None:
        server = start("--model", "/model", *FLAGS)
        server.wait_healthy()
        assert _ask(server) == "tiny"
        assert server.python(EMBED) == EMBEDDINGS_REFUSED

    @pytest.mark.parametrize(
        ("entrypoint", "words"),
        [
            ("vllm", ("serve", "/model")),  # also Kubernetes' command: ["vllm", "serve", ...]
            ("python3", ("-m", "vllm.entrypoints.openai.api_server", "--model", "/model")),
        ],
    )
    def test_entry_points_of_stock(self, start: Start, entrypoint: str, words: tuple[str, ...]) -> None:
        server = start(*words, *FLAGS, "--port", "8123", options=("--entrypoint", entrypoint))
        server.wait_healthy()
        assert _ask(server, "http://127.0.0.1:8123") == "tiny"
        assert _report(server, "http://127.0.0.1:8123")["verdict"]["status"] == "passed"

    def test_unix_domain_socket(self, start: Start) -> None:
        server = start("/model", *FLAGS, "--uds", "/tmp/vllm.sock")
        server.wait_healthy()
        said = server.python(UDS, "/tmp/vllm.sock")
        assert said == "200"

    def test_several_api_servers(self, start: Start) -> None:
        server = start("/model", *FLAGS, "--api-server-count", "2")
        server.wait_healthy()
        report = _report(server)
        assert sum(entry["role"] == "api_server" for entry in report["processes"]) == 2
        assert _ask(server) == "tiny"

    def test_tls_an_api_key_and_a_root_path(self, start: Start, tmp_path: Path) -> None:
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
             "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
            check=True, capture_output=True,
        )  # fmt: skip
        server = start(
            "/model", *FLAGS, "--ssl-keyfile", "/tls/key.pem", "--ssl-certfile", "/tls/certificate.pem",
            "--api-key", "of the operator", "--root-path", "/models",
            options=("--volume", f"{tmp_path}:/tls:ro"),
        )  # fmt: skip
        server.wait_healthy()
        assert server.python(TLS, "/tls/certificate.pem", "of the operator").split() == [
            "401",
            "200",
            "200",
            "200",
        ]


@pytest.mark.full
class TestEnds:
    """Exit codes of the README, as Docker sees them."""

    def test_a_killed_engine_core_is_an_error(self, start: Start) -> None:
        server = start("/model", *FLAGS)
        server.wait_healthy()
        server.python(KILL_AN_ENGINE)
        assert server.wait_end(30) not in (0, 137)

    def test_a_stop_while_loading_is_obeyed(self, start: Start) -> None:
        server = start("/model", *FLAGS)
        wait_until(lambda: "EngineCore" in server.logs(400), "loading", 120)
        code, seconds = server.stop()
        print(f"docker stop while loading: code {code} after {seconds:.1f} s")
        assert code == 0
        assert seconds < 15

    def test_stock_mode_serves_and_is_healthy(self, start: Start) -> None:
        server = start("/model", *FLAGS, environ={"SPLINT_MODE": "off"})
        print(f"stock: healthy after {server.wait_healthy():.1f} s")
        assert _ask(server) == "tiny"
        assert server.python(EMBED) == EMBEDDINGS_REFUSED
        assert server.stop()[0] == 0


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        (("--grpc",), {}, 78, "--grpc"),
        ((), {"SPLINT_SMOK": "full"}, 78, "Did you mean SPLINT_SMOKE?"),
        (("--port", "eight"), {}, 2, "--port"),
    ],
)
def test_refusals_before_anything_is_loaded(
    start: Start, words: tuple[str, ...], environ: dict[str, str], code: int, said: str
) -> None:
    server = start("/model", *FLAGS, *words, environ=environ)
    assert server.wait_end(60) == code
    assert said in server.logs()
