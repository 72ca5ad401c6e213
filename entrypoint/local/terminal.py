"""Who gets Ctrl-C: this process alone, so that ``make`` above it sees an orderly end and not an interruption."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["own_foreground"]


@contextmanager
def own_foreground() -> Iterator[None]:
    """Stand alone in the terminal's foreground, as a job of its own; does nothing elsewhere."""
    before = _foreground_group()
    if before is None or before != os.getpgrp() or before == os.getpid():
        yield
        return
    os.setpgid(0, 0)
    # To a background group these mean "stop"; the first comes from taking the foreground, the second from Ctrl-Z,
    # after which nobody would notice that we stand still, since the shell watches make.
    for number in (signal.SIGTTOU, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(sys.stdin.fileno(), before)


def _foreground_group() -> int | None:
    """The process group that the terminal's keys reach, or None where there is no terminal."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno())
    except (OSError, ValueError):
        return None
