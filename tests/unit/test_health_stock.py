"""`splint health` with SPLINT_MODE=off: small servers whose command lines are those of stock vLLM."""

from __future__ import annotations

import datetime as dt
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from entrypoint import health, stock

SERVER = """
import http.server, os, socket, ssl, sys
status, words = int(os.environ["STATUS"]), sys.argv
def value(name): return words[words.index(name) + 1] if name in words else None
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(status if self.path == "/health" else 404); self.end_headers()
    def address_string(self): return "client"
    def log_message(self, *_): pass
if "--headless" in words:
    print("up", flush=True); sys.stdin.read()
family = socket.AF_UNIX if value("--uds") else socket.AF_INET
class Server(http.server.HTTPServer):
    address_family = family
    def server_bind(self): self.socket.bind(self.server_address); self.server_name = self.server_port = ""
server = Server(value("--uds") or ("127.0.0.1", int(value("--port") or 0)), Handler)
if value("--ssl-certfile"):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(value("--ssl-certfile"), value("--ssl-keyfile"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
print("up", flush=True)
server.serve_forever()
"""

Serve = Callable[..., list[str]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A server started as stock vLLM is: ``serve(*flags, status=200) -> its command line as /proc shows it``."""
    running: list[subprocess.Popen[str]] = []
    script = tmp_path / "vllm"
    script.write_text(SERVER)

    def serve(*flags: str, status: int = 200) -> list[str]:
        command = [sys.executable, str(script), "serve", "my/model", *flags]
        environ = {**os.environ, "STATUS": str(status), "SPLINT_MODE": "off"}
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True))
        assert running[-1].stdout is not None
        assert running[-1].stdout.readline() == "up\n"
        return stock._words(running[-1].pid)

    yield serve
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """Certificate and key of a name that is not this machine's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api.example")])
    now = dt.datetime.now(dt.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1)).not_valid_after(now + dt.timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    chain, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(chain), str(secret)


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_servers_own_answer_on_its_port_decides(serve: Serve, port: str, status: int, *, healthy: bool) -> None:
    assert stock.answer(serve("--port", port, status=status)) == (healthy, f"/health says {status}")


def test_a_unix_socket_is_asked(serve: Serve, tmp_path: Path) -> None:
    assert stock.answer(serve("--uds", str(tmp_path / "s"))) == (True, "/health says 200")


def test_a_server_with_tls_is_asked_whatever_name_its_certificate_has(
    serve: Serve, port: str, certificate: tuple[str, str]
) -> None:
    words = serve("--port", port, "--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1])
    assert stock.answer(words) == (True, "/health says 200")


def test_a_port_from_a_config_file_is_found(serve: Serve, port: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"port: {port}\n")
    serve("--port", port)
    assert stock.answer(["python", "/bin/vllm", "serve", "m", "--config", str(config)])[0]


def test_a_server_that_does_not_listen_yet_is_unhealthy(port: str) -> None:
    healthy, said = stock.answer(["python", "/bin/vllm", "serve", "m", "--port", port])
    assert not healthy
    assert said.startswith("/health does not answer (")


def test_a_headless_node_is_healthy_while_its_process_runs(serve: Serve) -> None:
    assert stock.answer(serve("--headless")) == (True, "headless, its process runs")


def test_the_server_is_found_by_its_command_line(
    serve: Serve, port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = serve("--port", port)
    ours = [pid for pid in stock._own() if str(tmp_path) in str(stock._words(pid))]
    monkeypatch.setattr(stock, "_own", lambda: [os.getpid(), *ours])
    monkeypatch.setenv("SPLINT_MODE", "off")
    assert stock.newest_server() == words
    assert health.main([]) == 0
    assert capsys.readouterr().out == "healthy: /health says 200\n"


def test_no_server_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPLINT_MODE", "off")
    monkeypatch.setattr(stock, "_own", list)
    assert health.main([]) == 1
    assert capsys.readouterr().out == "unhealthy: no vLLM server of this user runs here\n"
