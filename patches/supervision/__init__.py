"""The supervising parent: a server's first process, which sees to it that the server ends as it should.

Imported at the start of every Python process of the environment, so this module imports nothing.
What the parent itself needs is imported in the parent only.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CACHE_SERVERS",
    "DRAIN_S",
    "SUPERVISOR_PID",
    "cache_server",
    "is_serving_command",
    "is_supervised",
    "supervise",
    "vllm_program",
]

SUPERVISOR_PID = "SPLINT_SUPERVISOR_PID"
# Seconds that requests in flight get by default; with the engines' own end below the 30 s that Kubernetes grants.
DRAIN_S = 20
# What `lmcache server` runs, and the same without an HTTP port, each as a module.
CACHE_SERVERS = ("lmcache.v1.multiprocess.http_server", "lmcache.v1.multiprocess.server")


def is_serving_command(argv: Sequence[str]) -> bool:
    """Whether ``argv`` (``sys.orig_argv``) starts a vLLM server. Costs under 1 µs where it names no vLLM."""
    if not any("vllm" in argument for argument in argv):
        return False
    from patches.supervision.command import is_serving

    return is_serving(argv)


def cache_server(argv: Sequence[str]) -> str:
    """The program by which ``argv`` (``sys.orig_argv``) starts an LMCache server: ``lmcache`` or a module's name."""
    for word in argv:
        if word in CACHE_SERVERS:
            return word
    return "lmcache" if "server" in argv and any("lmcache" in word for word in argv) else ""


def vllm_program(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The vLLM module that ``argv`` runs (``vllm`` for its command) and its arguments; ``("", [])`` for any other."""
    if not any("vllm" in argument for argument in argv):
        return "", []
    from patches.supervision.command import program

    name, words = program(argv)
    return (name, words) if name.partition(".")[0] == "vllm" else ("", [])


def is_supervised(environ: Mapping[str, str], parent_pid: int) -> bool:
    """Whether the parent of this process is a supervising parent already.

    Args:
        environ: The process's environment.
        parent_pid: ``os.getppid()``.
    """
    return environ.get(SUPERVISOR_PID) == str(parent_pid)


def supervise() -> None:
    """Fork: the child returns and becomes the server, the parent watches it and never returns.

    Must run before any thread is started. Returns without a fork where there is no Linux underneath.
    Never raises: where there is no usable run directory it says so and ends the process with exit code 78.
    """
    from patches.supervision.fork import supervise as fork

    fork()
