"""Ways into a server other than a plain port: TLS with client certificates, an API key, a root path.

The KV dtype comes by SPLINT_KV_DTYPE, to a plain ``vllm serve``.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import Server, running

VLLM_SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key and a self-signed certificate that serves as authority, server and client at once."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


def test_client_certificates_an_api_key_and_a_root_path(
    build: Callable[..., Server], certificate: tuple[Path, Path]
) -> None:
    key, own = certificate
    server = build(
        "--ssl-keyfile", str(key), "--ssl-certfile", str(own), "--ssl-ca-certs", str(own), "--ssl-cert-reqs", "2",
        "--api-key", "of the operator", "--root-path", "/models", form=VLLM_SERVE,
        env={"SPLINT_KV_DTYPE": "fp8_e5m2"},
    )  # fmt: skip
    trusting = ssl.create_default_context(cafile=own)
    trusting.load_cert_chain(own, key)
    base = f"https://127.0.0.1:{server.port}"

    def ask(path: str, **headers: str) -> Any:
        return httpx.get(base + path, verify=trusting, headers=headers, timeout=10)

    def ready() -> bool:
        try:
            return bool(ask("/readyz").status_code == 200)
        except httpx.TransportError:
            return False

    with running(server):
        print(f"open after {server.wait_for(ready):.1f} s")
        key_header = {"Authorization": "Bearer of the operator"}
        report = ask("/splint/report", **key_header).json()
        check_shown(server, ask, report)
        assert report["kv_cache"] == {"dtype": "fp8_e5m2", "pinned": "fp8_e5m2"}
        verdict = report["verdict"]
        skipped = {check["id"]: check["reason"] for check in verdict["checks"] if check["status"] == "skipped"}
        assert verdict["status"] == "passed"
        assert "client certificates" in skipped["port"]
        assert ask("/v1/models").status_code == 401
        assert ask("/v1/models", **key_header).status_code == 200


def check_shown(server: Server, ask: Callable[..., Any], report: dict[str, Any]) -> None:
    """Report and page: for those who have the key, without it, and without the paths of this machine."""
    refused = ask("/splint/report")
    assert (refused.status_code, set(refused.json())) == (401, {"phase", "seconds", "error"})
    assert [ask(path).status_code for path in ("/livez", "/readyz", "/startupz", "/metrics", "/splint/")] == [200] * 5
    shown = json.dumps(report) + ask("/splint/").text
    model = next(word for word in server.command if word.startswith("/") and "tiny" in word)
    for hidden in ("of the operator", model, str(server.log.parent), sys.prefix):
        assert hidden not in shown, hidden
