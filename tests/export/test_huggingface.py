"""Hugging Face directories, judged by what Transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ampaudit.core.source_config import SourceConfig
from ampaudit.export.restore import restore
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


def test_weights_in_bfloat16_that_the_plan_uses_in_float32_are_not_loaded_in_float16(tmp_path: Path) -> None:
    """They are stored as they were, in 16 bits, which says nothing about the plan."""
    zoo.ZOO["bert"]().model.bfloat16().save_pretrained(tmp_path / "hf")
    source = open_source(str(tmp_path / "hf"), SourceConfig())
    out = converted(source, tmp_path / "out", policy="torch-cuda", program=False)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_tensors_that_the_model_lacks_do_not_decide_the_dtype(tmp_path: Path) -> None:
    from transformers import BertModel

    made = zoo.bert().model
    made.save_pretrained(tmp_path / "hf")
    state = made.state_dict() | {"cls.seq_relationship.weight": torch.ones(2, 32)}
    safetensors.torch.save_file(state, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    source = open_source(str(tmp_path / "hf"), SourceConfig())
    out = converted(source, tmp_path / "out", policy="half", program=False)
    assert same_bits(load(out / "model.safetensors")["cls.seq_relationship.weight"], torch.ones(2, 32))
    assert BertModel.from_pretrained(out, dtype="auto").dtype is torch.float16


def test_the_config_of_each_tower_names_the_stored_dtype(tmp_path: Path) -> None:
    """As Transformers writes a model that was loaded in bfloat16."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(
            text_config=tower | {"vocab_size": 50, "max_position_embeddings": 16, "dtype": "bfloat16"},
            vision_config=tower | {"image_size": 16, "patch_size": 8, "dtype": "bfloat16"},
            projection_dim=8,
        )
    ).bfloat16()
    model.save_pretrained(tmp_path / "hf")
    before = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert before["text_config"]["dtype"] == before["vision_config"]["dtype"] == "bfloat16"
    source = open_source(str(tmp_path / "hf"), SourceConfig())
    out = converted(source, tmp_path / "out", policy="half", program=False)
    after = json.loads((out / "config.json").read_text())
    towers = ("text_config", "vision_config")
    assert {after["dtype"], *(after[tower]["dtype"] for tower in towers)} == {"float16"}
    loaded = CLIPModel.from_pretrained(out, dtype="auto")
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float16}
    restore(out, tmp_path / "back", force=False)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {back["dtype"], *(back[tower]["dtype"] for tower in towers)} == {"bfloat16"}
