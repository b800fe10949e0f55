"""Restoring the original checkpoint from the masters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from ampaudit.core.errors import UsageError, WeightsError
from ampaudit.core.source_config import SourceConfig
from ampaudit.export.restore import restore
from ampaudit.source.open import open_source
from tests.support import zoo
from tests.support.converted import converted, load, same_bits, tied


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_masters_restore_every_bit(tmp_path: Path, policy: str) -> None:
    source = tied()
    path = tmp_path / "before.safetensors"
    safetensors.torch.save_model(source.model, str(path), {"author": "somebody"})
    out = converted(source, tmp_path / "out", policy=policy, weights=path)
    restore(out, tmp_path / "back", force=False)
    before, after = load(path), load(tmp_path / "back" / "model.safetensors")
    assert set(before) == set(after)
    assert all(same_bits(before[name], after[name]) for name in before)
    with safe_open(path, "pt") as a, safe_open(tmp_path / "back" / "model.safetensors", "pt") as b:
        assert a.metadata() == b.metadata()


def test_a_bfloat16_directory_is_restored_as_one(tmp_path: Path) -> None:
    made = zoo.bert().model.bfloat16()
    made.save_pretrained(tmp_path / "hf")
    source = open_source(str(tmp_path / "hf"), SourceConfig())
    out = converted(source, tmp_path / "out", policy="half", program=False)
    assert {t.dtype for t in load(out / "model.safetensors").values()} == {torch.float16}
    restore(out, tmp_path / "back", force=False)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_without_masters_nothing_is_restored(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="half", masters=False)
    assert not (out / "master.safetensors").exists()
    with pytest.raises(UsageError, match="no masters"):
        restore(out, tmp_path / "back", force=False)
    assert not (tmp_path / "back").exists()


def test_a_damaged_master_is_not_restored(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="half")
    path = out / "master.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="was changed after the conversion"):
        restore(out, tmp_path / "back", force=False)
    assert not (tmp_path / "back").exists()
