"""Files and directories of another form than one model, and modules of Lightning that only train."""

from __future__ import annotations

import ast
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.core.errors import InputError, SourceError
from ampaudit.core.source_config import SourceConfig
from ampaudit.source.open import open_source
from ampaudit.source.processor import processor_directory
from tests.support.processors import tokenizer

LIGHTNING = """
import lightning
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return {"loss": loss}
"""
UNET = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30"}
BATCH = "def example_inputs():\n    return torch.randn(4, 8), torch.tensor([0, 1, 2, 0])\n"
LOADER = """
    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.randn(12, 8), torch.zeros(12).long())
        return torch.utils.data.DataLoader(data, batch_size=4)
"""


def refused(path: Path, words: str) -> str:
    with pytest.raises(SourceError, match=words) as caught:
        open_source(str(path), SourceConfig())
    assert caught.value.exit_code == 2
    return caught.value.hint


def written(path: Path, table: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table), encoding="utf-8")
    return path.parent


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["model.pt", "model.ts", "model"])
def test_a_torchscript_program_is_named(tmp_path: Path, model_file: Callable[..., Path], name: str) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    scripted.save(str(tmp_path / name))
    assert "torch.export.save" in refused(tmp_path / name, "is a TorchScript program")
    body = f"def get_model():\n    return torch.jit.load({str(tmp_path / name)!r})\n"
    path = model_file(body + "def example_inputs():\n    return torch.randn(2, 4)\n")
    assert "Python model" in refused(path, "is a TorchScript program")
    with pytest.raises(SourceError, match="is a TorchScript program"):
        scan(torch.jit.freeze(scripted.eval()), torch.randn(2, 4))
    torch.save({"a": torch.ones(1)}, tmp_path / "state.pt")
    with pytest.raises(SourceError) as caught:
        open_source(str(tmp_path / "state.pt"), SourceConfig())
    assert "TorchScript" not in str(caught.value)


def test_a_pipeline_names_its_parts(tmp_path: Path) -> None:
    index = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "safety_checker": [None, None],
        "../up": ["transformers", "X"],
    }
    written(tmp_path / "pipe" / "model_index.json", index)
    unet = written(
        tmp_path / "pipe" / "unet" / "config.json",
        UNET,
    )
    text = written(tmp_path / "pipe" / "text_encoder" / "config.json", {"model_type": "clip_text_model"})
    hint = refused(tmp_path / "pipe", r"is a Diffusers pipeline \(StableDiffusionPipeline\)")
    assert hint.startswith(f"scan its parts: ampaudit scan {text}; a Python file whose get_model() returns ")
    assert f"UNet2DConditionModel.from_pretrained('{unet}')" in hint
    assert "up" not in hint.replace("example_inputs", "")
    assert "UNet2DConditionModel.from_pretrained" in refused(unet, "is a UNet2DConditionModel of Diffusers")


@pytest.mark.skipif(os.name == "nt", reason="Windows allows no such names")
def test_names_in_hints_are_safe_to_paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are shortened
    pipeline, shell, python = Path("pipe"), "u; rm -rf ~ $(id)'`id`", "x'); import_('id'); ('\"\\"
    index = {shell: ["transformers", "X"], python: ["diffusers", "UNet(); evil"], "plain": ["diffusers"]}
    written(pipeline / "model_index.json", index)
    for name in index:
        written(pipeline / name / "config.json", UNET)
    hint = refused(pipeline, "is a Diffusers pipeline")
    first, *others = hint.split("; a Python file whose get_model() returns ")
    assert shlex.split(first.partition(": ")[2]) == ["ampaudit", "scan", str(pipeline / shell)]
    for way, name, kind in zip(others, (python, "plain"), ("Model", "diffusers"), strict=True):
        call = ast.parse(way.removesuffix(", with example_inputs()"), mode="eval").body
        assert isinstance(call, ast.Call)
        assert ast.unparse(call.func) == f"{kind}.from_pretrained"
        assert ast.literal_eval(call.args[0]) == str(pipeline / name)
    whole = Path(shell)
    written(whole / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    (whole / "modules.json").write_text("[]", encoding="utf-8")
    hint = refused(whole / "1_Pooling", "is a layer")
    assert shlex.split(hint.partition(": ")[2]) == ["ampaudit", "scan", str(whole)]
    path = Path(f"{shell}.ckpt")
    path.write_bytes(b"x")
    words = shlex.split(refused(path, "holds weights").partition(", where")[0])
    assert words == ["ampaudit", "scan", "model.py", "--weights", str(path)]
    path = path.rename(path.with_suffix(".ipynb"))
    words = shlex.split(refused(path, "is a notebook").partition("or: ")[2])
    assert words == ["ampaudit", "lint", str(path)]
    assert "hf download" not in refused(Path("org/$(id);rm"), "no such file")


def test_a_part_of_a_pipeline_has_its_processor_beside_it(tmp_path: Path) -> None:
    for name in ("text_encoder", "text_encoder_2", "image_encoder"):
        (tmp_path / name).mkdir()
    tokenizer().save_pretrained(tmp_path / "tokenizer_2")
    written(tmp_path / "feature_extractor" / "preprocessor_config.json", {})
    assert processor_directory(tmp_path / "text_encoder_2") == tmp_path / "text_encoder_2"
    written(tmp_path / "model_index.json", {})
    assert processor_directory(tmp_path / "text_encoder_2") == tmp_path / "tokenizer_2"
    assert processor_directory(tmp_path / "image_encoder") == tmp_path / "feature_extractor"


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    written(tmp_path / "adapter_config.json", {"base_model_name_or_path": "org/base\x1b[31m"})
    assert "merge_and_unload()" in refused(
        tmp_path, r"holds an adapter .* of org/base\\x1b\[31m, not a whole"
    )


def test_a_layer_of_a_sentence_model_names_the_whole(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]", encoding="utf-8")
    path = written(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    assert refused(path, "is a layer of a Sentence").endswith(f"ampaudit scan {tmp_path}")


def test_a_training_step_is_audited(model_file: Callable[..., Path]) -> None:
    path = str(model_file(LIGHTNING + BATCH))
    source = open_source(path, SourceConfig())
    x, y = source.batches[0].args
    expected = nn.functional.cross_entropy(source.model.net(x), y)
    assert torch.equal(source.model(x, y), expected)
    report = scan(path)
    assert report.exit_code == 0
    assert [site.site for site in report.sites if site.op == "aten.linear.default"] == [
        "net.0/linear",
        "net.2/linear",
    ]
    assert scan(path, backward=True).backward is not None


def test_a_lightning_module_brings_its_own_batches(model_file: Callable[..., Path]) -> None:
    source = open_source(str(model_file(LIGHTNING + LOADER)), SourceConfig(batches=2))
    assert len(source.batches) == 2
    assert source.inputs.origin == "given"
    assert source.model(*source.batches[1].args).shape == ()
    same = model_file(
        LIGHTNING + LOADER + "    def forward(self, x):\n        return self.net(x)\n", "own.py"
    )
    model = open_source(str(same), SourceConfig()).model
    assert model(torch.randn(2, 8)).shape == (2, 3)


def test_the_users_own_module_is_left_alone(model_file: Callable[..., Path]) -> None:
    from ampaudit.source.user_code import module_from_file

    module = module_from_file(model_file(LIGHTNING))
    model = module.Lit().eval()
    report = scan(model, (torch.randn(4, 8), torch.tensor([0, 1, 2, 0])))
    assert report.exit_code == 0
    assert type(model) is module.Lit


def test_manual_optimization_has_no_loss(model_file: Callable[..., Path]) -> None:
    body = LIGHTNING.replace('return {"loss": loss}', "return None") + BATCH
    source = open_source(str(model_file(body)), SourceConfig())
    with pytest.raises(InputError, match="training_step of Lit returns no loss"):
        source.model(*source.batches[0].args)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("self.optimizers()", "training_step of Lit needs a Trainer: Lit is not attached"),
        ("self.trainer.global_rank", "training_step of Lit needs a Trainer: Lit is not attached"),
        ("self.automatic_optimization = False", "Lit optimizes manually"),
    ],
)
def test_a_training_step_that_needs_a_trainer(
    model_file: Callable[..., Path], code: str, words: str, backward: bool
) -> None:
    place = "super().__init__()" if "automatic" in code else "x, y = batch"
    body = LIGHTNING.replace(place, f"{place}; {code}") + BATCH
    with pytest.raises(InputError, match=words) as caught:
        scan(str(model_file(body)), backward=backward)
    assert caught.value.hint == "give the module a forward() that returns the loss"


@pytest.mark.parametrize(
    "signature", ["*args", "batch", "batch, index=0", "batch, index, loader=0", "batch, **kwargs"]
)
def test_a_training_step_gets_what_it_takes(model_file: Callable[..., Path], signature: str) -> None:
    check = "batch, index = args" if signature == "*args" else "pass"
    body = LIGHTNING.replace("self, batch, batch_idx):", f"self, {signature}):\n        {check}")
    source = open_source(str(model_file(body + BATCH)), SourceConfig())
    assert source.model(*source.batches[0].args).shape == ()


def test_an_error_with_a_loss_lists_the_users_inputs(model_file: Callable[..., Path]) -> None:
    body = LIGHTNING.replace("x, y = batch", "x, y = batch; raise ValueError('mine')") + BATCH
    with pytest.raises(SourceError, match="mine") as caught:
        scan(str(model_file(body)), backward=True)
    expected = "input[0]: float32[4, 8] on cpu, input[1]: int64[4] on cpu"
    assert caught.value.hint.endswith(f"it was given {expected}")
