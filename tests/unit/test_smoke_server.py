from __future__ import annotations

import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from entrypoint.smoke.prompts import Tokens
from entrypoint.smoke.server import Server
from patches.serving_gate.plan import SMOKE_HEADER, SmokePlan

PLAN = SmokePlan(
    base_url="", secret="open-sesame", model="m", runner="generate", max_model_len=64, block_size=16, vocab_size=512,
    prefix_caching=True, dp_ranks=(0,), cache_dtype="auto", expected_roster=(), timeout_s=10.0, api_key="key",
)  # fmt: skip


class Echo(BaseHTTPRequestHandler):
    """Answers with an empty model list and keeps the request's headers."""

    seen: dict[str, str]

    def do_GET(self) -> None:
        type(self).seen = dict(self.headers)
        body = b'{"object": "list", "data": []}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class UnixServer(socketserver.UnixStreamServer):
    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        request, _ = super().get_request()
        return request, ("local", 0)


@contextmanager
def running(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def models(plan: SmokePlan) -> list[str]:
    server = Server(plan)
    try:
        return [model.id for model in server.openai.models.list()]
    finally:
        server.close()


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate that names another host and expired long ago, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name}.example")])
    cert = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=timezone.utc))
        .not_valid_after(datetime(2020, 1, 2, tzinfo=timezone.utc))
        .sign(key, hashes.SHA256())
    )
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / f"{name}.key").write_bytes(plain)
    (folder / f"{name}.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    return str(folder / f"{name}.pem"), str(folder / f"{name}.key")


@pytest.fixture
def https(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Base URL and certificate of an https server."""
    cert, key = certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = HTTPServer(("127.0.0.1", 0), Echo)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        yield f"https://127.0.0.1:{server.server_address[1]}", cert


def test_the_servers_own_certificate_is_trusted_whatever_name_and_age_it_has(https: tuple[str, str]) -> None:
    url, cert = https
    assert models(replace(PLAN, base_url=url, ca_file=cert)) == []


def test_another_certificate_is_not_trusted(https: tuple[str, str], tmp_path: Path) -> None:
    server = Server(replace(PLAN, base_url=https[0], ca_file=certificate(tmp_path, "other")[0]))
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        server.http.get(https[0])
    server.close()


def test_a_unix_socket_is_connected_through(tmp_path: Path) -> None:
    with running(UnixServer(str(tmp_path / "socket"), Echo)):
        assert models(replace(PLAN, base_url="http://localhost", uds=str(tmp_path / "socket"))) == []


def test_every_request_carries_the_secret_and_the_key_and_no_proxy_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    server = HTTPServer(("127.0.0.1", 0), Echo)
    with running(server):
        models(replace(PLAN, base_url=f"http://127.0.0.1:{server.server_address[1]}"))
    seen = {name.lower(): value for name, value in Echo.seen.items()}
    assert (seen[SMOKE_HEADER], seen["authorization"]) == ("open-sesame", "Bearer key")


def test_the_secret_is_in_no_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    server = HTTPServer(("127.0.0.1", 0), Echo)
    with caplog.at_level(logging.DEBUG), running(server):
        models(replace(PLAN, base_url=f"http://127.0.0.1:{server.server_address[1]}"))
    assert "models" in caplog.text
    assert "open-sesame" not in caplog.text


def test_no_two_salts_are_equal() -> None:
    assert len({Tokens(512).salt() for _ in range(100)}) == 100
