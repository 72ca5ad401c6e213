from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import patches
from entrypoint.cli import app
from entrypoint.tables import PatchRow, patch_rows

runner = CliRunner()


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).stdout == f"vllm-splint {patches.__version__}\n"


def test_patches_as_json_has_every_record_in_order() -> None:
    rows = json.loads(runner.invoke(app, ["patches", "--json"]).stdout)
    assert [row["id"] for row in rows] == list(patches.PATCH_IDS)
    assert all(row["purpose"] and row["retires"] and row["state"] for row in rows)


def test_patches_for_people_names_each_with_its_purpose() -> None:
    shown = runner.invoke(app, ["patches"], env={"COLUMNS": "200"}).stdout
    for patch in patches.catalogue():
        assert patch.id in shown
        assert patch.purpose[:60] in shown


def test_a_patch_that_is_left_out_is_shown_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINT_PATCHES", "-serving_gate")
    states = {row.patch.id: row.state for row in patch_rows()}
    assert states["serving_gate"] == "off"


def test_a_changed_source_is_shown_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.framework.fingerprints.reviewed", lambda _: _nothing_reviewed())
    rows = [row for row in patch_rows() if row.patch.library == "vllm"]
    assert {row.state for row in rows} - {"retired", "too old"} <= {"refused", "no library"}


def _nothing_reviewed() -> object:
    from patches.framework.fingerprints import Reviewed

    return Reviewed({}, {}, frozenset())


def test_a_library_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.tables.release_of", lambda _: None)
    assert {row.state for row in patch_rows()} == {"no library"}


def test_a_release_outside_the_range_retires_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.tables.release_of", lambda _: "99")
    rows: list[PatchRow] = patch_rows()
    ends = {row.patch.id for row in rows if "<" in row.patch.releases}
    assert {row.patch.id for row in rows if row.state == "retired"} == ends


def test_a_release_before_the_range_is_too_old_and_not_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.tables.release_of", lambda _: "0.1")
    assert {row.state for row in patch_rows()} == {"too old"}


def test_a_malformed_setting_is_one_message_and_code_78() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "entrypoint.cli", "patches"],
        env={"SPLINT_PATCHES": "no_such", "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 78
    assert ended.stderr.startswith("splint: SPLINT_PATCHES names no_such")


def test_an_unknown_command_is_a_usage_error() -> None:
    assert runner.invoke(app, ["sreve"]).exit_code == 2


@pytest.mark.parametrize("command", [["patches"], ["--version"], ["report", "--help"], ["review"]])
def test_no_command_imports_vllm_or_torch(command: list[str]) -> None:
    script = (
        "import sys; from entrypoint.cli import main; sys.argv = ['splint', *sys.argv[1:]]\n"
        "try: main()\nfinally: print([n for n in ('vllm', 'torch', 'lmcache') if n in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == "[]"


def test_patches_takes_less_than_a_second_of_a_core() -> None:
    """Of processor time: other work on the machine does not count."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "entrypoint.cli", "patches"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    spent = min(once() for _ in range(3))
    print(f"splint patches: {spent:.2f} s of a core")
    assert spent < 1.0


def test_review_names_each_function_and_the_release_it_was_reviewed_in() -> None:
    ended = runner.invoke(app, ["review"])
    assert ended.exit_code == 0, ended.stdout
    assert all(line.startswith("reviewed") for line in ended.stdout.splitlines())


def test_review_of_an_unreviewed_function_ends_with_78() -> None:
    ended = runner.invoke(app, ["review", "vllm.v1.engine.core:EngineCore.no_such"])
    assert ended.exit_code == 78
    assert ended.stdout == "missing   vllm.v1.engine.core:EngineCore.no_such\n"


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["a-model", "--help"], ["--help=all", "--json"]])
def test_the_doctor_answers_a_request_for_help_itself(words: list[str]) -> None:
    """Handed on, vLLM's parser prints its help and ends: a finding without a word, and exit code 78."""
    result = runner.invoke(app, ["doctor", *words])
    assert (result.exit_code, result.output.startswith("Usage: splint doctor")) == (0, True)
