"""What people point ampaudit at: each target, how it is made, and what a scan says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tests.support.paths import ROOT
from tests.support.processors import SPEECH, bert, clip, image_processor, tokenizer, whisper

MODELS = ROOT / "tests" / "targets" / "models"


@dataclass(frozen=True)
class Case:
    """One target.

    Attributes:
        title: what it is, in words for the documentation.
        make: writes it into a folder and returns its path, or the name of a file of ``models/``.
        gives: what the scan prints; a part of its output.
        code: the exit code.
        options: further words of the command line.
        needs: packages without which it cannot be made.
    """

    title: str
    make: str | Callable[[Path], str]
    gives: str
    code: int = 0
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def location(self, folder: Path) -> str:
        """Return the path, made if need be."""
        return str(MODELS / f"{self.make}.py") if isinstance(self.make, str) else self.make(folder)

    @property
    def name(self) -> str:
        return self.make if isinstance(self.make, str) else self.make.__name__


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


def exported_program(folder: Path) -> str:
    path = folder / "program.pt2"
    torch.export.save(torch.export.export(_net(), (torch.randn(2, 8),)), path)
    return str(path)


def torchscript(folder: Path) -> str:
    path = folder / "scripted.pt"
    torch.jit.save(torch.jit.trace(_net(), torch.randn(2, 8)), path)
    return str(path)


def state_dict(folder: Path) -> str:
    path = folder / "weights.pt"
    torch.save(_net().state_dict(), path)
    return str(path)


def safetensors(folder: Path) -> str:
    from safetensors.torch import save_file

    path = folder / "weights.safetensors"
    save_file(_net().state_dict(), path)
    return str(path)


def onnx(folder: Path) -> str:
    from tests.support.onnx_graphs import mlp

    path = folder / "model.onnx"
    path.write_bytes(mlp().SerializeToString())
    return str(path)


def gguf(folder: Path) -> str:
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    return str(path)


def keras(folder: Path) -> str:
    path = folder / "model.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n")
    return str(path)


def notebook(folder: Path) -> str:
    path = folder / "train.ipynb"
    path.write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return str(path)


def hub_name(folder: Path) -> str:
    return "google-bert/bert-base-uncased"


def import_path(folder: Path) -> str:
    return "tests.targets.models.mlp:get_model"


def class_alone(folder: Path) -> str:
    return str(MODELS / "class_with_arguments.py")


def bert_directory(folder: Path) -> str:
    bert().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def bert_alone(folder: Path) -> str:
    bert().save_pretrained(folder)
    return str(folder)


def clip_directory(folder: Path) -> str:
    clip().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return str(folder)


def whisper_directory(folder: Path) -> str:
    from transformers import WhisperFeatureExtractor

    whisper().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=SPEECH["num_mel_bins"], chunk_length=3).save_pretrained(folder)
    return str(folder)


def pipeline(folder: Path) -> str:
    index = {"_class_name": "StableDiffusionPipeline", "text_encoder": ["transformers", "CLIPTextModel"]}
    (folder / "text_encoder").mkdir()
    (folder / "text_encoder" / "config.json").write_text(json.dumps({"model_type": "clip_text_model"}))
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(folder)


def adapter(folder: Path) -> str:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    return str(folder)


PASS, FAIL = "PASS nothing breaks in float16", "FAIL 1 place breaks in float16"

CASES = (
    Case("A small network", "mlp", PASS),
    Case("Convolutions and batch norm", "convolutions", PASS),
    Case("U-Net with group norm and transposed convolutions", "unet", PASS),
    Case("`nn.LSTM`, two layers, both directions", "lstm", PASS),
    Case("`nn.TransformerEncoder`", "transformer", PASS),
    Case("`nn.Transformer` with keyword inputs", "seq2seq", PASS),
    Case("Attention with a mask of -1e9", "attention_mask", PASS),
    Case("A decoder step with its cache, nested in and out", "decoder_with_cache", PASS),
    Case("Mixture of experts with top-k routing", "experts", PASS),
    Case("Embedding bags and dense features", "recommender", PASS),
    Case("Audio: `torch.stft` and its logarithm", "spectrum", PASS),
    Case("Complex weights and FFTs", "complex_values", "PASS nothing runs in float16"),
    Case("Several outputs in a dataclass", "many_outputs", PASS),
    Case("Buffers written in place", "in_place_buffers", PASS),
    Case("Batches from a `DataLoader`", "large_batches", "3 batches", options=("--batches", "3")),
    Case("A custom `autograd.Function`", "own_function", PASS, options=("--backward",)),
    Case("Checkpointed layers", "checkpointed", PASS, options=("--backward",)),
    Case("A feed-forward layer that overflows", "overflowing", FAIL, 1, options=("--policy", "half")),
    Case(
        "A graph network whose `index_add` mixes dtypes",
        "graph_network",
        "AMP307 mixed dtypes",
        1,
    ),
    Case(
        "A convolution with a bias behind `x.float()`",
        "timestep_embedding",
        "AMP307 mixed dtypes",
        1,
        options=("--policy", "half"),
    ),
    Case(
        "A class with arguments and no inputs",
        "class_with_arguments",
        "inputs: random inputs",
        options=("--args", "3,10", "--input", "8x3x32x32"),
    ),
    Case(
        "A class whose inputs have names and ranges",
        "words",
        "inputs: random inputs",
        options=("--input", "ids=2x7:int64@100", "--input", "mask=2x7:float32@0:1"),
    ),
    Case("A model that is in float16 already", "half_already", PASS),
    Case("`torch.compile(model)`", "compiled", PASS),
    Case("`nn.DataParallel(model)`", "data_parallel", PASS),
    Case("`torch.jit.script(model)`", "scripted", PASS),
    Case("Dynamic quantization", "dynamic_quantization", PASS),
    Case("Flex attention", "flex_attention", "not audited: flex_attention"),
    Case("A LightningModule with `forward`", "lightning_forward", PASS, needs=("lightning",)),
    Case(
        "A LightningModule with only `training_step`", "lightning_training_step", PASS, needs=("lightning",)
    ),
    Case("An import path", import_path, PASS),
    Case("An exported program (`.pt2`)", exported_program, PASS),
    Case("An ONNX file", onnx, "inputs: random inputs", needs=("onnx", "onnx_ir", "onnxruntime")),
    Case("A Hugging Face directory with its tokenizer", bert_directory, "inputs: built-in samples"),
    Case("A Hugging Face directory without a tokenizer", bert_alone, "inputs: random inputs"),
    Case("CLIP, with its tokenizer and image processor", clip_directory, "inputs: built-in samples"),
    Case("Whisper, with its feature extractor", whisper_directory, "inputs: built-in samples"),
    Case("A branch on values", "value_branch", "along the path that these inputs take"),
    Case("Packed sequences", "packed_sequences", "along the path that these inputs take"),
    Case("A traced model", "traced", "is a TorchScript program", 2),
    Case(
        "A forward pass that fails without ampaudit", "failing_forward", "the model itself fails in FP32", 2
    ),
    Case("A file without `example_inputs`", "missing_inputs", "such as --input 8x3x32x32", 2),
    Case("A class with arguments, without `--args`", class_alone, "SmallCNN --args ...", 2),
    Case("A training script", "training_script", "add: def get_model()", 2),
    Case("A TorchScript file", torchscript, "is a TorchScript program", 2),
    Case("A Diffusers pipeline", pipeline, "scan its parts: ampaudit scan", 2),
    Case("A PEFT adapter", adapter, "merge_and_unload()", 2),
    Case("A state dict alone", state_dict, "ampaudit scan model.py --weights", 2),
    Case("A safetensors file alone", safetensors, "ampaudit scan model.py --weights", 2),
    Case("A GGUF file", gguf, "quantized weights of another runtime", 2),
    Case("A Keras file", keras, "is not a PyTorch model", 2),
    Case("A notebook", notebook, "call ampaudit.scan(model, inputs) in a cell", 2),
    Case("The name of a model on the Hub", hub_name, "hf download google-bert/bert-base-uncased", 2),
)
