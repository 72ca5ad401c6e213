"""`splint image`: what an image's build asks of the installed project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from envsetup import tables
from typer.testing import CliRunner

import patches
from entrypoint.cli import app
from entrypoint.image import distributions, labels, verify
from patches import bootstrap
from patches.framework import process
from patches.framework.errors import SplintError

runner = CliRunner()


@pytest.fixture
def before(tmp_path: Path) -> Any:
    """Write a list of what the base had: ``before(*lines) -> path``."""

    def write(*lines: str) -> Path:
        path = tmp_path / "before.txt"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def torch_line(version: str | None = None) -> str:
    return f"torch=={version or distributions.installed()['torch']}"


def test_this_environment_is_verified_and_each_patch_named(before: Any) -> None:
    lines = list(verify.verify(before(torch_line(), "")))
    assert lines[0].startswith("Python 3")
    for patch in patches.catalogue():
        assert any(line.split()[0] == patch.id for line in lines[2:]), patch.id
    assert "nothing of the base moved; added: " in lines[-2]
    assert "vllm-splint" in lines[-2]
    assert lines[-1].startswith(f"verified: {len(patches.PATCH_IDS)} patches")


def test_a_moved_and_a_lost_distribution_are_named(before: Any) -> None:
    with pytest.raises(SplintError) as caught:
        list(verify.verify(before(torch_line("2.1"), "left_behind==1")))
    assert "torch 2.1 is now 2." in caught.value.found
    assert "left-behind 1 is now gone" in caught.value.found


def test_names_are_compared_as_pip_compares_them(before: Any) -> None:
    installed = {"hugging-face.hub": "1"}
    assert distributions.listed(before("Hugging_Face-Hub==1")) == {"hugging-face-hub": "1"}
    assert distributions._normalised("hugging-face.hub") == "hugging-face-hub"
    assert distributions.changes(installed, installed).moved == {}


@pytest.mark.parametrize("lines", [(), ("",), ("torch==2", "lmcache @ file:///x.whl"), ("torch",)])
def test_a_list_of_another_form_is_refused(before: Any, lines: tuple[str, ...]) -> None:
    with pytest.raises(SplintError, match="pip list --format=freeze"):
        distributions.listed(before(*lines))


def test_a_list_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SplintError, match="absent: No such file"):
        list(verify.verify(tmp_path / "absent"))


def test_a_patch_that_does_not_fit_the_base_ends_the_build_with_78_and_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from patches.framework import fingerprints

    monkeypatch.setattr(fingerprints, "reviewed", lambda _: fingerprints.Reviewed({}, {}, frozenset()))
    ended = runner.invoke(app, ["image", "verify"])
    assert isinstance(ended.exception, SplintError)
    assert "serving_gate is refused: vllm.entrypoints.launchers" in ended.exception.found


def test_a_patch_that_is_turned_off_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINT_PATCHES", "-kv_budget")
    with pytest.raises(SplintError, match="kv_budget is off"):
        list(verify.verify())


@pytest.mark.parametrize("library", ["vllm", "lmcache"])
def test_a_base_without_a_library_is_refused(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "installed_version", lambda name: None if name == library else "1")
    monkeypatch.setattr(verify, "release_of", lambda name: None if name == library else "1")
    with pytest.raises(SplintError, match=f"no {library}; wanted {library} in this image"):
        list(verify.verify())


def test_a_rebuilt_base_says_which_release_it_is_by_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "installed_version", lambda _: "2.0+acme")
    monkeypatch.setattr(verify, "release_of", lambda _: "0.32.0")
    assert "vllm 2.0+acme, by its sources 0.32.0" in next(verify.verify())


def test_an_environment_whose_start_up_hooks_did_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "started", lambda: False)
    with pytest.raises(SplintError, match="the start-up hooks did not run"):
        list(verify.verify())


def test_an_environment_without_the_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "entry_points", lambda **_: ())
    with pytest.raises(SplintError, match="no plugin vllm_splint"):
        list(verify.verify())


def test_the_labels_hold_the_whole_catalogue_and_the_patch_set_that_processes_attest() -> None:
    found = json.loads(runner.invoke(app, ["image", "labels"]).stdout)
    manifest = json.loads(found["io.vllm-splint.patches"])
    assert [row["id"] for row in manifest] == list(patches.PATCH_IDS)
    assert found["io.vllm-splint.patch-set"] == process.Process().attestation()["patch_set"]
    assert "vllm-0.32.0" in found["io.vllm-splint.reviewed"].split()


def test_labels_as_options_are_pairs_that_a_build_takes() -> None:
    lines = runner.invoke(app, ["image", "labels", "--form", "options"]).stdout.splitlines()
    assert set(lines[::2]) == {"--label"}
    assert dict(line.split("=", 1) for line in lines[1::2]) == labels.labels()


def test_the_dockerfile_gets_the_labels_between_its_markers() -> None:
    text = "FROM x\n# labels: generated by make tables\nLABEL old='1'\n# end of labels\nUSER 0\n"
    made = tables.render(text, tables.PAGES["Dockerfile"], "# {}")
    assert made.startswith("FROM x\n# labels: generated by make tables\nLABEL org.opencontainers.image.title=")
    assert made.endswith("'\n# end of labels\nUSER 0\n")
    assert "old" not in made
    assert made.count("'") == 2 * len(labels.fixed_labels())


def test_a_label_that_would_break_out_of_its_quotes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "fixed_labels", lambda: {"k": "vLLM's"})
    with pytest.raises(ValueError, match="k: a label with a quote"):
        tables.labels_instruction()
