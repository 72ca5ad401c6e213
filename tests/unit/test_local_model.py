"""The tiny models: made without a download, the same every time, never half."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.local import model
from entrypoint.local.model import ARCHITECTURES, VOCABULARY, make_tiny_model

MAKER = """
import sys
from pathlib import Path
from entrypoint.local.model import make_tiny_model
for folder, architecture in zip(sys.argv[1::2], sys.argv[2::2]): make_tiny_model(architecture, Path(folder))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two processes make the same model in the first folder at once; then each makes the other one in its own."""
    folder, second = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("second")
    both = [(folder, folder), (folder, second)]
    command = [sys.executable, "-c", MAKER]
    makers = [subprocess.Popen([*command, str(a), "qwen3_moe", str(b), "mixtral"]) for a, b in both]
    assert [maker.wait(timeout=300) for maker in makers] == [0, 0]
    return folder, second


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path]) -> Path:
    return folders[0]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_model_has_weights_tokenizer_and_chat_template(models: Path, architecture: str) -> None:
    path = make_tiny_model(architecture, models)
    assert json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"] == architecture
    assert (path / "model.safetensors").stat().st_size < 8_000_000
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    assert len(tokenizer["model"]["vocab"]) == VOCABULARY
    assert (path / "chat_template.jinja").read_text(encoding="utf-8") == model.CHAT_TEMPLATE


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_server_of_any_user_can_read_a_model(models: Path, architecture: str) -> None:
    folder = next(models.glob(f"tiny-{architecture}-*"))
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o644"}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_two_that_make_the_same_model_at_once_leave_one_and_no_rest(models: Path) -> None:
    assert sorted(path.name.rpartition("-")[0] for path in models.iterdir()) == ["tiny-mixtral", "tiny-qwen3_moe"]


def test_the_same_recipe_gives_the_same_bytes(folders: tuple[Path, Path]) -> None:
    first, second = (make_tiny_model("mixtral", folder) / "model.safetensors" for folder in folders)
    assert first.read_bytes() == second.read_bytes()


def test_a_model_that_is_there_is_not_made_again(models: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from entrypoint.local.model import make_tiny_model;"
        "make_tiny_model('mixtral', Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(models)], check=False, timeout=240).returncode == 0


def test_a_making_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_architecture: str, folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(model, "_write_tokenizer", lambda _folder: None)
    monkeypatch.setattr(model, "_write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        make_tiny_model("mixtral", tmp_path)
    assert list(tmp_path.iterdir()) == []
