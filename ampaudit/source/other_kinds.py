"""Says what to do with a location that is not a model, without opening it."""

from __future__ import annotations

import re
from pathlib import Path

from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import describe

__all__ = ["not_a_model"]

_FORMATS = "give file.py, file.py:factory, package.module:factory, a model directory, or a .pt2 file"
_WEIGHTS = (
    "holds weights, not a model",
    "ampaudit scan model.py --weights {path}, where get_model() in model.py builds the model",
)
_OTHER_FRAMEWORK = ("is not a PyTorch model", "scan the PyTorch model that it was made from")
_KINDS = {
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt"): _WEIGHTS,
    (".gguf",): (
        "holds the quantized weights of another runtime",
        "scan the Hugging Face directory that it was made from",
    ),
    (".onnx", ".engine", ".plan", ".trt", ".tflite", ".mlmodel", ".mlpackage"): _OTHER_FRAMEWORK,
    (".h5", ".hdf5", ".keras", ".pb", ".msgpack"): _OTHER_FRAMEWORK,
    (".ipynb",): ("is a notebook", "call ampaudit.scan(model, inputs) in a cell, or 'ampaudit lint {path}'"),
    (".json", ".yaml", ".yml", ".toml"): (
        "is a configuration file",
        "give the model's directory, or a Python file",
    ),
}
_HUB = re.compile(r"(?:https?://huggingface\.co/)?([\w.-]+/[\w.-]+|[A-Za-z][\w.-]*-[\w.-]+)/?")


def not_a_model(location: str) -> SourceError:
    """Return the error that fits ``location``, which no reader knows."""
    path = Path(location)
    shown = describe(location)
    if not path.exists():
        hub = _HUB.fullmatch(location)
        hint = "check the path of the model"
        if hub:
            hint += f"; for a model of the Hub, run 'hf download {hub[1]} --local-dir DIR' and scan DIR"
        return SourceError(f"no such file or directory: {shown}", hint=hint)
    for suffixes, (kind, next_step) in _KINDS.items():
        if path.suffix.lower() in suffixes:
            return SourceError(f"{shown} {kind}", hint=next_step.format(path=shown))
    return SourceError(f"{shown} is not in a model format that ampaudit reads", hint=_FORMATS)
