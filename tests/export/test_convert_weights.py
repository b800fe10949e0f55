"""Checkpoints converted alone: dtypes, shards, and outputs that cannot be written."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from ampaudit.core.errors import OutputError, UsageError, WeightsError
from ampaudit.export.config import ConvertConfig
from ampaudit.export.manifest import read_manifest
from ampaudit.export.restore import restore
from ampaudit.export.weights import convert_weights
from tests.support.converted import load, same_bits


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(tensors, path, {"format": "pt", "step": "100"})
    else:
        torch.save(tensors, path)
    return path


WEIGHTS = {
    "a.weight": torch.linspace(-3, 3, 64).view(8, 8),
    "a.bias": torch.linspace(-3, 3, 8),
    "big.weight": torch.full((2, 2), 1e5),
    "ids": torch.arange(4),
    "eight": torch.ones(3, 3).to(torch.float8_e5m2),
    "double": torch.ones(2, 2, dtype=torch.float64),
    "already": torch.ones(2, 2, dtype=torch.float16),
    "brain": torch.full((2, 2), 1.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.25),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
def test_a_checkpoint_alone(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"w{suffix}", WEIGHTS)
    made = convert_weights(path, tmp_path / "out", ConvertConfig())
    after = load(tmp_path / "out" / "model.safetensors")
    assert made.exit_code == 0
    lowered = {"a.weight", "already", "brain", "empty"}
    for name, tensor in WEIGHTS.items():
        expected = tensor.half() if name in lowered else tensor
        assert same_bits(after[name], expected), name
    assert "does not fit" in read_manifest(tmp_path / "out").tensors["big.weight"].reason
    restore(tmp_path / "out", tmp_path / "back", force=False)
    back = load(tmp_path / "back" / "model.safetensors")
    assert all(same_bits(back[name], tensor) for name, tensor in WEIGHTS.items())
    if suffix == ".safetensors":
        with safe_open(tmp_path / "back" / "model.safetensors", "pt") as opened:
            assert opened.metadata() == {"format": "pt", "step": "100"}
        assert (tmp_path / "back" / "model.safetensors").read_bytes() == path.read_bytes()


def test_a_policy_of_16_bit_weights_casts_all_and_says_what_breaks(tmp_path: Path) -> None:
    weights = WEIGHTS | {"nan": torch.tensor([1.0, math.nan, math.inf]), "wide": torch.tensor([2.0, -7e4])}
    weights["wide"] = weights["wide"].double()
    made = convert_weights(save(tmp_path / "w.pt", weights), tmp_path / "out", ConvertConfig(policy="half"))
    after = load(tmp_path / "out" / "model.safetensors")
    assert made.overflow == {"big.weight": 4, "wide": 1}
    assert made.broken == {"nan": 2}
    assert made.exit_code == 1
    assert after["big.weight"].isinf().all()
    assert same_bits(after["a.bias"], WEIGHTS["a.bias"].half())
    assert after["double"].dtype is torch.float16  # as ``.half()`` has it


@pytest.mark.parametrize("policy", ["as-is", "apex-o0"])
def test_a_policy_that_lowers_nothing_changes_nothing(tmp_path: Path, policy: str) -> None:
    path = save(tmp_path / "w.safetensors", WEIGHTS)
    convert_weights(path, tmp_path / "out", ConvertConfig(policy=policy))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == path.read_bytes()
    assert not (tmp_path / "out" / "master.safetensors").exists()


def test_a_policy_that_asks_for_modules_needs_the_model(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pt", WEIGHTS)
    with pytest.raises(UsageError, match="by the class of their module"):
        convert_weights(path, tmp_path / "out", ConvertConfig(policy="keep-fp32-modules"))
    unused: list[dict[str, Any]] = [{"mode": "train"}, {"onnx": True}, {"tune": 50.0}, {"io": "float16"}]
    for options in (ConvertConfig(**fields) for fields in unused):
        with pytest.raises(UsageError, match="no graph"):
            convert_weights(path, tmp_path / "out", options)


def test_shards_stay_shards(tmp_path: Path) -> None:
    first, second = {"a": torch.randn(9, 9), "b": torch.randn(3)}, {"c": torch.randn(4, 4)}
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name, tensors in zip(names, (first, second), strict=True):
        safetensors.torch.save_file(tensors, tmp_path / name, {"format": "pt"})
    weight_map = {"a": names[0], "b": names[0], "c": names[1]}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 400}, "weight_map": weight_map}))
    convert_weights(index, tmp_path / "out", ConvertConfig())
    table = json.loads((tmp_path / "out" / index.name).read_text())
    assert table["weight_map"] == weight_map
    assert table["metadata"]["total_size"] == 81 * 2 + 3 * 4 + 16 * 2
    for name, tensors in zip(names, (first, second), strict=True):
        after = load(tmp_path / "out" / name)
        assert all(same_bits(after[n], t.half() if t.dim() == 2 else t) for n, t in tensors.items())
    masters = json.loads((tmp_path / "out" / "master.safetensors.index.json").read_text())
    assert masters["weight_map"]["c"] == "master-00002-of-00002.safetensors"
    restore(tmp_path / "out", tmp_path / "back", force=False)
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert json.loads((tmp_path / "back" / index.name).read_text())["metadata"]["total_size"] == 400


@pytest.mark.parametrize(
    ("shards", "index", "twice"),
    [
        (["master-1.safetensors", "master-2.safetensors"], "master", "master.safetensors.index.json"),
        (["model-x.safetensors", "x.safetensors"], "model", "master-x.safetensors"),
        (["Model.safetensors", "model.safetensors"], "model", "model.safetensors"),
        (["manifest.json", "model.safetensors"], "model", "manifest.json"),
    ],
)
def test_files_that_would_have_the_same_name(
    tmp_path: Path, shards: list[str], index: str, twice: str
) -> None:
    names = {f"{number}.weight": shard for number, shard in enumerate(shards)}
    for name, shard in names.items():
        safetensors.torch.save_file({name: torch.ones(2, 2)}, tmp_path / shard)
    path = tmp_path / f"{index}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(WeightsError, match=f"two files of the conversion would be named '{twice}'"):
        convert_weights(path, tmp_path / "out", ConvertConfig())
    assert not (tmp_path / "out").exists()


def test_a_name_that_safetensors_reserve(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pt", {"__metadata__": torch.ones(2, 2)})
    with pytest.raises(WeightsError, match="'__metadata__', which safetensors cannot hold"):
        convert_weights(path, tmp_path / "out", ConvertConfig())


def test_existing_output(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pt", WEIGHTS)
    convert_weights(path, tmp_path / "out", ConvertConfig())
    with pytest.raises(OutputError, match="exists"):
        convert_weights(path, tmp_path / "out", ConvertConfig())
    convert_weights(path, tmp_path / "out", ConvertConfig(policy="half", force=True))
    assert read_manifest(tmp_path / "out").policy == "half"


def test_a_link_as_output(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OutputError, match="symbolic link"):
        convert_weights(save(tmp_path / "w.pt", WEIGHTS), tmp_path / "link", ConvertConfig(force=True))


def small_files_only() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


def test_a_disk_that_is_full_half_way(tmp_path: Path) -> None:
    """The limit on the size of a file makes a real write fail in the middle."""
    path = save(tmp_path / "w.safetensors", {"w": torch.randn(1000, 1000)})
    (tmp_path / "room").mkdir()
    command = [sys.executable, "-m", "ampaudit", "convert", str(path), "-o", str(tmp_path / "room" / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=small_files_only, check=False, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ampaudit: cannot write")
    assert "nothing was changed" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path / "room") == []
