"""A headless Chromium, told what to do over its DevTools protocol: no driver, no download."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

__all__ = ["Tab", "browser"]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_KEYS = {"Tab": 9, "Enter": 13, " ": 32}


class Tab:
    """One page. ``complaints`` are the errors that its console and its policy reported.

    Args:
        socket: A connected websocket of the page's DevTools target.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv(timeout=120))
            self._note(told)
            if told.get("id") == number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result

    def _note(self, told: dict[str, Any]) -> None:
        if told.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["params"]["exceptionDetails"])[:500])
        if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            self.complaints.append(told["params"]["entry"]["text"])

    def open(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Go to ``url`` in a window of that size and colour scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        return told["result"].get("value")

    def text(self) -> str:
        """What a reader sees."""
        return str(self.ask("document.body.innerText"))

    def wait(self, expression: str, within_s: float = 120.0) -> None:
        """Wait until the expression is true."""
        deadline = time.monotonic() + within_s
        while not self.ask(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} never was:\n{self.text()[:2000]}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """One key, as from a keyboard."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text if kind == "keyDown" else "",
                      windowsVirtualKeyCode=_KEYS[key])  # fmt: skip

    def write(self, text: str) -> None:
        """Text into the element that has the focus."""
        self.send("Input.insertText", text=text)

    def picture(self, path: Path) -> Path:
        """The whole page as PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A tab of a fresh browser whose profile lies in ``folder``.

    Raises:
        FileNotFoundError: there is none on this machine.
    """
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        raise FileNotFoundError(f"found none of {', '.join(_NAMES)}; wanted one. Install Debian's package chromium.")
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with connect(_address(folder, process), max_size=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """The first page's DevTools address, which the browser tells in its profile folder."""
    told = folder / "DevToolsActivePort"
    deadline = time.monotonic() + 60
    while not told.exists() or not told.read_text():
        assert process.poll() is None, "Chromium ended"
        assert time.monotonic() < deadline, "Chromium did not start"
        time.sleep(0.05)
    port = told.read_text().split()[0]
    targets = httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
    return next(str(target["webSocketDebuggerUrl"]) for target in targets if target["type"] == "page")
