"""Hugging Face directories, judged by what Transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ampaudit.core.source_config import SourceConfig
from ampaudit.source.open import open_source
from tests.support import zoo
from tests.support.converted import converted, load, same_bits


def test_given_weights_are_those_that_are_written(tmp_path: Path) -> None:
    """A Hugging Face directory with another checkpoint: the files of the directory are not mixed in."""
    made = zoo.bert().model
    made.save_pretrained(tmp_path / "hf")
    state = {name: tensor * 2 for name, tensor in made.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    source = open_source(str(tmp_path / "hf"), SourceConfig(weights=tmp_path / "w.safetensors"))
    options = {"policy": "half", "weights": tmp_path / "w.safetensors", "program": False}
    stored = load(converted(source, tmp_path / "out", **options) / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    assert same_bits(stored[name], state[name].half())


@pytest.mark.parametrize(
    ("architecture", "policy"),
    [
        ("bert", "half"),
        ("t5", "half"),
        ("t5", "keep-fp32-modules"),
        ("mixtral", "half"),
    ],
)
def test_transformers_loads_what_was_stored(tmp_path: Path, architecture: str, policy: str) -> None:
    """Also where the file's names are not the model's, and where experts are put together on loading."""
    import transformers

    torch.manual_seed(0)
    made = zoo.ZOO[architecture]().model
    made.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    source = open_source(str(tmp_path / "hf"), SourceConfig())
    out = converted(source, tmp_path / "out", policy=policy, program=False)
    index = "model.safetensors.index.json"
    assert (
        json.loads((out / index).read_text())["weight_map"]
        == (json.loads((tmp_path / "hf" / index).read_text())["weight_map"])
    )
    loaded = getattr(transformers, type(made).__name__).from_pretrained(out, dtype="auto")
    before = made.state_dict()
    for name, tensor in loaded.state_dict().items():
        kept = architecture == "t5" and ".wo." in name  # the class keeps it in FP32
        assert tensor.dtype is (torch.float32 if kept else torch.float16), name
        exact = kept and policy == "keep-fp32-modules"
        assert torch.equal(tensor, before[name]) if exact else torch.equal(tensor.half(), before[name].half())
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
