"""Sources that change while they are converted, and links in them that lead out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ampaudit import convert
from ampaudit.core.errors import SourceError
from ampaudit.export import convert as whole
from ampaudit.export import weights as by_name
from ampaudit.export.config import ConvertConfig
from ampaudit.export.convert import copy_companions
from ampaudit.export.weight_files import WeightFiles, write_weights

Write = Callable[[str], Path]
BODY = """
def get_model():
    return nn.Linear(8, 4).eval()

def example_inputs():
    return torch.ones(2, 8)
"""


def save(path: Path, value: float) -> Path:
    safetensors.torch.save_file({"weight": torch.full((4, 8), value), "bias": torch.zeros(4)}, path)
    return path


def replaced(path: Path) -> None:
    os.replace(save(path.with_name("other.tmp"), 2.0), path)


def written(path: Path) -> None:
    save(path, 2.0)


@pytest.mark.parametrize("change", [replaced, written, Path.unlink])
@pytest.mark.parametrize("of_a_model", [True, False])
def test_a_source_that_changes_is_told_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_file: Write,
    change: Callable[[Path], None],
    of_a_model: bool,
) -> None:
    weights, out = save(tmp_path / "w.safetensors", 1.0), tmp_path / "out"

    def then_change(*arguments: object, **options: object) -> WeightFiles:
        made = write_weights(*arguments, **options)  # type: ignore[arg-type]
        change(weights)
        return made

    monkeypatch.setattr(whole if of_a_model else by_name, "write_weights", then_change)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept

    def run() -> object:
        if of_a_model:
            return convert(str(model_file(BODY)), None, out, weights=weights)
        return by_name.convert_weights(weights, out, ConvertConfig())

    with pytest.raises(SourceError, match=r"w\.safetensors changed while it was read"):
        run()
    assert not out.exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_a_link_that_leads_out_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    source, target = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    (source / "readme.txt").write_text("hello")
    (source / "again.txt").symlink_to("readme.txt")
    copy_companions(source, target, tmp_path / "elsewhere")
    assert sorted(path.name for path in target.iterdir()) == ["again.txt", "readme.txt"]
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    (tmp_path / "second").mkdir()
    with pytest.raises(SourceError, match=r"notes\.txt is a link to .*secret"):
        copy_companions(source, tmp_path / "second", tmp_path / "elsewhere")
    assert "key" not in [path.read_text() for path in (tmp_path / "second").iterdir()]


def test_earlier_conversions_within_the_source_are_not_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "model" / "bf16"
    for place in ("fp16/vision/config.json", "fp16/manifest.json", "vision/config.json", "bf16/x"):
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        (source / place).write_text("{}")
    (tmp_path / "stage").mkdir()
    copy_companions(source, tmp_path / "stage", target)
    copied = [path.relative_to(tmp_path / "stage") for path in (tmp_path / "stage").rglob("*.*")]
    assert copied == [Path("vision/config.json")]


def test_the_cache_of_hugging_face_consists_of_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--x"
    source = repository / "snapshots" / "abc"
    source.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text("tokens")
    (source / "vocab.txt").symlink_to("../../blobs/123")
    (tmp_path / "out").mkdir()
    copy_companions(source, tmp_path / "out", tmp_path / "elsewhere")
    assert (tmp_path / "out" / "vocab.txt").read_text() == "tokens"
    assert not (tmp_path / "out" / "vocab.txt").is_symlink()
