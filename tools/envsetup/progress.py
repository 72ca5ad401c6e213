"""Runs a step that takes long, and says what it is at."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Step", "StepFailedError"]

# In a log that is no terminal, one line each this many seconds is enough.
QUIET_SECONDS = 15.0
NEWS_LETTERS = 60
_NEWS = re.compile(r"^\s*(Collecting|Downloading|Using cached|Installing collected packages|Building|Processing)\b(.*)")


class StepFailedError(Exception):
    """A command of a step failed; the message is the last that it said."""


class Step:
    """One numbered step of the set-up, printed with its seconds while it runs and when it is done.

    Attributes:
        gauge: Says how far pip has come with installing, of which it prints nothing itself.
    """

    gauge: Callable[[], str] | None = None

    def __init__(self, number: int, total: int, title: str) -> None:
        self._title = f"[{number}/{total}] {title}"
        self._started = time.monotonic()
        self._news = ""
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Step:  # noqa: PYI034 - Self is newer than Python 3.8, which may run this
        self._print("")
        self._ticker.start()
        return self

    def __exit__(self, kind: object, *_rest: object) -> None:
        self._done.set()
        self._ticker.join()
        outcome = "done" if kind is None else "stopped"
        print(f"{_clear()}{self._title}: {outcome} after {time.monotonic() - self._started:.0f} s", flush=True)

    def run(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        """Run ``command``, its output going to ``log``.

        Raises:
            StepFailedError: it ended with a code other than 0.
        """
        said: list[str] = []
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n")
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
            ) as process:
                try:
                    self._follow(process, file, said)
                finally:
                    process.terminate()
        if process.returncode != 0:
            raise StepFailedError(_reason(said))

    def _follow(self, process: subprocess.Popen[str], file: object, said: list[str]) -> None:
        for line in process.stdout or ():
            print(line, end="", file=file, flush=True)  # type: ignore[call-overload]
            said.append(line.rstrip())
            news = _NEWS.match(line)
            if news:
                self._news = _short(news[1] + news[2])
        process.wait()

    def _tick(self) -> None:
        interval = 1.0 if sys.stdout.isatty() else QUIET_SECONDS
        while not self._done.wait(interval):
            self._print(f" {time.monotonic() - self._started:.0f} s")

    def _print(self, seconds: str) -> None:
        news = self.gauge() if self.gauge and self._news.startswith("Installing") else self._news
        news = f" ({news})" if news else ""
        end = "" if sys.stdout.isatty() else "\n"
        print(f"{_clear()}{self._title} …{seconds}{news}", end=end, flush=True)


def _clear() -> str:
    """What moves a terminal's cursor to the start of an empty line."""
    return "\r\033[K" if sys.stdout.isatty() else ""


def _short(news: str) -> str:
    """The start of pip's line, without the address that it may end in."""
    words = re.sub(r"(https?|file)://\S*/", "", " ".join(news.split()))
    words = re.sub(r" \(from .*", "", words)
    return words if len(words) <= NEWS_LETTERS else words[: NEWS_LETTERS - 1] + "…"


def _reason(said: list[str]) -> str:
    """The error lines of pip's output, else its last line."""
    errors = [line for line in said if line.startswith("ERROR") or "error:" in line.lower()]
    return "\n".join(errors[-3:] or said[-1:])
