"""The ``splint`` command. Each command imports what it needs; only ``plan`` imports vLLM, for its planning code."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

import patches
from entrypoint.image.command import image
from entrypoint.planning import command as planning

if TYPE_CHECKING:
    from rich.console import Console

    from patches.serving_gate.plan import CheckResult

__all__ = ["app", "main"]

app = typer.Typer(
    name="splint",
    help="vLLM and LMCache with their known faults held: proven before anything is served.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(planning.plan)
app.add_typer(image, name="image")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=False, highlight=False)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _version(value: bool) -> None:
    if value:
        print(f"vllm-splint {patches.__version__}")
        raise typer.Exit


@app.callback()
def _splint(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version
    _check_settings()


def _check_settings() -> None:
    from patches.framework.errors import EXIT_REFUSED, SettingError
    from patches.framework.selection import check_settings

    if os.environ.get("SPLINT_MODE") == "off":
        return
    try:
        check_settings()
    except SettingError as error:
        print(f"splint: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_REFUSED) from None


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve a model: every argument is one of `vllm serve`."""
    from entrypoint import serve as serving

    raise typer.Exit(serving.main(context.args))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Examine a server before it starts: every argument but --json is one of `vllm serve`. Exit code 0 or 78."""
    raise typer.Exit(_doctor(context.args))


_DOCTOR_HELP = """Usage: splint doctor [--json] [arguments of vllm serve]

Runs the preflight, reads the configuration as vLLM would, and says what is wrong, why it matters and what to change.
Nothing is started, no model is loaded. Exit code 0, or 78 where something speaks against a start.
"""


def _doctor(words: list[str]) -> int:
    if any(word.partition("=")[0] in ("--help", "-h") for word in words):
        print(_DOCTOR_HELP, end="")
        return 0
    from entrypoint.doctor.examine import examine
    from patches.framework.errors import EXIT_REFUSED

    as_json = "--json" in words
    found = examine([word for word in words if word != "--json"], dict(os.environ), _whisper)
    if as_json:
        _print_json(found.to_json())
    else:
        from entrypoint.doctor.render import render

        _console().print(render(found))
    return 0 if found.healthy else EXIT_REFUSED


def _whisper(text: str) -> None:
    """On standard error: whoever pipes the output wants nothing else in it, but must not think that it hangs."""
    print(f"splint doctor: {text}", file=sys.stderr, flush=True)


@app.command("patches")
def show_patches(as_json: Json = False) -> None:
    """List the patches and their state on the installed releases."""
    from entrypoint.tables import patch_rows, render

    rows = patch_rows()
    if as_json:
        _print_json([row.to_json() for row in rows])
        return
    _console().print(render(rows))


@app.command()
def report(
    base_url: Annotated[str | None, typer.Option(help="The server's address, without /v1.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="The server's key.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a server says about its patches, its processes and its smoke tests."""
    from entrypoint import report as reports

    folder = None if base_url else reports.newest_folder()
    found = reports.from_folder(folder) if folder else reports.fetch(base_url or reports.DEFAULT_URL, api_key)
    if as_json:
        _print_json(found)
    else:
        _console().print(reports.render(found))


@app.command()
def health() -> None:
    """Say whether the server of this machine or container is open, from its run directory; exit code 0 or 1."""
    from entrypoint import health as healths

    raise typer.Exit(healths.main([]))


@app.command()
def smoke(
    base_url: Annotated[str, typer.Option(help="The server's address, without /v1.")],
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Seconds for all checks together.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Run the smoke tests against a running server: those that need no closed gate."""
    from entrypoint.smoke import battery
    from entrypoint.smoke.check import Context
    from entrypoint.smoke.checks import CHECKS
    from entrypoint.smoke.outside import plan_for, with_an_answer
    from entrypoint.smoke.server import Server
    from patches.framework.errors import EXIT_SMOKE_FAILED

    plan = plan_for(base_url, api_key, timeout_s)
    context = Context(plan, Server(plan), secret_passes=False)
    found = battery.run(context, CHECKS, (lambda _: None) if as_json else _say)
    verdict = with_an_answer(found)
    if as_json:
        _print_json(verdict.to_json())
    else:
        for check in verdict.checks[len(found.checks) :]:
            _say(check)
        left_out = [check.id for check in verdict.checks if check.status == "skipped"]
        print(f"{verdict.status} in {verdict.seconds:.1f} s; left out: {', '.join(left_out) or 'nothing'}")
    _leave(0 if verdict.status == "passed" else EXIT_SMOKE_FAILED)


def _say(result: CheckResult) -> None:
    line = f"{result.id:<13} {result.status:<8} {result.seconds:6.2f} s  {result.reason or result.proves}"
    print(line, flush=True)


def _leave(code: int) -> None:
    """End at once: a check that hangs holds a thread whose end must not be waited for."""
    sys.stdout.flush()
    os._exit(code)


@app.command()
def review(
    names: Annotated[
        list[str] | None, typer.Argument(help="module:qualname; all of the catalogue where none is given.")
    ] = None,
) -> None:
    """Compare the installed sources with the reviewed ones; exit code 78 where one differs."""
    from entrypoint.reviewing import differences
    from patches.framework.errors import EXIT_REFUSED

    lines = list(differences(names or []))
    for line in lines:
        print(line)
    if any(line.differs for line in lines):
        raise typer.Exit(EXIT_REFUSED)


def main() -> None:
    """Run the command that the command line names."""
    from patches.framework.errors import EXIT_REFUSED, SplintError

    if sys.argv[1:2] == ["serve"]:
        from entrypoint import serve as serving

        # Not through typer: it would take "--" and abbreviations for its own.
        sys.exit(serving.main(sys.argv[2:]))
    try:
        if sys.argv[1:2] == ["doctor"]:
            _check_settings()
            _leave(_doctor(sys.argv[2:]))
        app()
    except SplintError as error:
        print(f"splint: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
