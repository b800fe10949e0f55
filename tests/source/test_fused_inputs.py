"""Random pictures and sound for models that put their features into a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ampaudit import scan
from ampaudit.core.errors import UsageError
from ampaudit.source.generated_inputs import (
    GeneratedInputs,
    InputRequest,
    MetaRun,
    ValuesNeeded,
    check_ids,
    find_fusions,
    generate_inputs,
    resize_batches,
)
from ampaudit.trace.fake_model import without_data
from tests.support.fused import FUSED, MODALITY, PLACEHOLDER, fused_model
from tests.support.processors import tokenizer

MAIN = {"image": "pixel_values", "audio": "input_features"}
WEIGHT_IS_READ = ("model.audio_tower.embed_positions", "model.vision_tower.embeddings.position_embedding")
META = torch.device("meta")


def made(model: Any, folder: Path, batches: int | None = None) -> GeneratedInputs:
    found = generate_inputs(model, InputRequest(files={}, batches=batches, seed=0), folder)
    check_ids(model, found["batches"])
    return found


def never_run(model: Any, parts: tuple[str, ...], batch: dict[str, torch.Tensor]) -> list[str]:
    """Run a model; return the layers with parameters in these parts that are not called."""
    inside = [
        (name, module)
        for name, module in model.named_modules()
        if set(parts) & set(name.split(".")) and module._parameters and not list(module.children())
    ]
    ran = set[str]()
    for name, module in inside:
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
    with torch.no_grad():
        model(**batch)
    assert inside
    return [name for name, _ in inside if name not in ran]


@pytest.mark.parametrize("name", FUSED)
def test_every_layer_of_a_tower_runs(name: str, tmp_path: Path) -> None:
    model, modality = fused_model(name), MODALITY.get(name, "image")
    found = made(model, tmp_path)
    (batch,) = found["batches"]
    assert found["origin"] == "random"
    assert MAIN[modality] in found["detail"]
    assert [layer for layer in never_run(model, FUSED[name][1], batch) if layer not in WEIGHT_IS_READ] == []


@pytest.mark.parametrize("name", ["Llava", "Qwen2VL"])
def test_batches_differ_and_nothing_changes_the_model(name: str, tmp_path: Path) -> None:
    model = fused_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: dict(vars(module)) for key, module in model.named_modules()}
    first, second = made(model, tmp_path, batches=2)["batches"]
    assert not torch.equal(first["pixel_values"], second["pixel_values"])
    assert not torch.equal(first["input_ids"], second["input_ids"])
    again, _ = made(model, tmp_path, batches=2)["batches"]
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert {key: dict(vars(module)) for key, module in model.named_modules()} == state
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_what_a_model_does_not_take_leaves_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused_model("Llava")
    model.config.text_config.max_position_embeddings = 12  # and a picture has 16 features
    found = made(model, tmp_path, batches=2)
    assert [sorted(batch) for batch in found["batches"]] == [["attention_mask", "input_ids"]] * 2
    assert found["batches"][0]["input_ids"].shape == (2, 12)
    monkeypatch.setattr("ampaudit.source.generated_inputs.find_fusions", lambda model, batch: [])
    alone = made(model, tmp_path, batches=2)
    for batch, other in zip(found["batches"], alone["batches"], strict=True):
        assert all(torch.equal(batch[key], other[key]) for key in batch)
    assert found["detail"] == alone["detail"]


@pytest.mark.parametrize(
    "change",
    [
        {"image_size": 10**9},
        {"image_size": "large"},
        {"patch_size": None},
        {"image_size": [32, 32, 32]},
        {"max_num_tiles": 10**9},
        {"max_num_tiles": "many"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Mllama", "Qwen2VL"])
def test_absurd_sizes_leave_the_text_alone(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    model = fused_model(name)
    vars(model.config.vision_config).update(change)
    assert "input_ids" in made(model, tmp_path)["batches"][0]
    if name == "Mllama" and "patch_size" not in change:
        assert find_fusions(model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)}) == []


def test_a_placeholder_without_an_embedding_is_not_used(tmp_path: Path) -> None:
    model = fused_model("Llava")
    model.config.image_token_id = 300  # the size of the vocabulary
    assert "pixel_values" not in made(model, tmp_path)["batches"][0]


def test_built_in_sentences_get_a_picture(tmp_path: Path) -> None:
    words = tokenizer()
    words.save_pretrained(tmp_path)
    model = fused_model("Llava")
    model.config.save_pretrained(tmp_path)
    found = made(model, tmp_path)
    assert (found["origin"], found["detail"]) == ("random", "built-in text samples; random pixel_values")
    (batch,) = found["batches"]
    assert bool((batch["input_ids"][:, :16] == PLACEHOLDER).all())
    assert bool((batch["attention_mask"][:, :16] == 1).all())
    assert words.decode(batch["input_ids"][0, 16:], skip_special_tokens=True).startswith("The kettle was")
    assert never_run(model, FUSED["Llava"][1], batch) == []


@pytest.mark.parametrize("name", ["Llava", "LlavaNext", "Qwen2VL", "Florence2"])
def test_pictures_stay_whole_at_every_size(name: str, tmp_path: Path) -> None:
    model = fused_model(name)
    batches = made(model, tmp_path)["batches"]
    number = int((batches[0]["input_ids"][0] == PLACEHOLDER).sum())
    for size, rows in ((number + 5, 3), (number + 50, 1)):
        (batch,) = resize_batches(batches, [PLACEHOLDER], {"length": size, "batch": rows})
        assert batch.kwargs["input_ids"].shape == (rows, size)
        with torch.no_grad():
            model(**batch.kwargs)  # which compares the numbers of features and placeholders
    (batch,) = resize_batches(batches, [PLACEHOLDER], {"batch": 2})
    assert all(torch.equal(batch.kwargs[key], value) for key, value in batches[0].items())
    with pytest.raises(UsageError, match=f"a length of {number} has no room") as caught:
        resize_batches(batches, [PLACEHOLDER], {"length": number})
    assert f"more than {number}" in caught.value.hint


@pytest.mark.parametrize("gain", [1.0, 2.0**20])
def test_a_tower_is_scanned_without_a_processor(gain: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fused_model("Gemma3")
    with torch.no_grad():
        layers = model.model.vision_tower.encoder.layers[0].mlp
        layers.fc1.weight.mul_(gain)  # x 2^20 is beyond float16
        layers.fc2.weight.div_(gain)
    model.save_pretrained(tmp_path)
    report = scan(str(tmp_path), dtype=torch.float16, policy="half", device="cpu")
    assert report.run.inputs.origin == "random"
    assert "pixel_values" in report.run.inputs.detail
    assert report.gaps == ()
    sites = {str(finding.site) for finding in report.findings if finding.severity == "error"}
    assert report.verdict == ("fail" if sites else "pass")
    assert all(site.startswith("model.vision_tower.encoder.layers.0.mlp.fc1") for site in sites)
    assert bool(sites) == (gain != 1.0)


def test_values_that_follow_from_inputs_are_known() -> None:
    weight, mask = torch.empty(4, 3, device=META), torch.tensor([True, False, True, True])
    with MetaRun():
        assert torch.ones(3, device=META).sum().item() == 3
        assert mask.to(META).nonzero().flatten().tolist() == [0, 2, 3]
        assert weight[mask.to(weight.device)].shape == (3, 3)
        assert torch.nn.functional.embedding(torch.tensor([[3]]), weight).shape == (1, 1, 3)
        assert (weight + torch.ones(3)).to("cpu").is_meta
        for needs in (
            lambda: weight[weight[:, 0] > 0],
            lambda: weight.sum().item(),
            lambda: torch.zeros(4, 3).copy_(weight),
            lambda: torch.zeros(4, 3).masked_scatter_(mask[:, None], weight),
        ):
            with pytest.raises(ValuesNeeded):
                needs()
        with pytest.raises(IndexError, match="row 4 of an embedding with 4"):
            torch.nn.functional.embedding(torch.tensor([4]), weight)


def test_a_copy_without_weights_keeps_ties() -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    copy = without_data(torch.nn.Sequential(first, second, torch.nn.BatchNorm1d(3)), torch.nn.Module.eval)
    assert copy[0].weight is copy[1].weight
    assert all(tensor.is_meta for tensor in (*copy.parameters(), *copy.buffers()))
    assert not first.weight.is_meta
    assert not copy.training
