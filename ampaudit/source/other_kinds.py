"""Recognizes locations that are not a single model, and says what to scan instead."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ampaudit.checkpoint.open import open_checkpoint
from ampaudit.checkpoint.plain_pickle import CodeNeeded
from ampaudit.core.errors import SourceError, WeightsError
from ampaudit.core.text import shell_quoted
from ampaudit.core.untrusted import describe, describe_path, open_regular, read_table
from ampaudit.source.model_config import ADAPTER, CONFIG_FILE, PIPELINE, read_raw_config

__all__ = ["not_a_model", "refuse_other_kinds"]

_MODULES = "modules.json"
_PARTS_SHOWN = 4
_TAIL = 1 << 20  # bytes at the end of an archive that hold its member names
_SCRIPTED = b"/code/__torch__"
_ARCHIVES = (".pt", ".pth", ".ts", ".torchscript", ".jit", ".ptc", ".bin", "")
_FORMATS = "give file.py, file.py:factory, package.module:factory, a model directory, or a .pt2 or .onnx file"
_WEIGHTS = (
    "holds weights, not a model",
    "ampaudit scan model.py --weights {path}, where get_model() in model.py builds the model",
)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_FRAMEWORK = ("is not a PyTorch model", "scan the PyTorch model that it was made from")
_KINDS = {
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt"): _WEIGHTS,
    (".gguf",): (
        "holds the quantized weights of another runtime",
        "scan the Hugging Face directory that it was made from",
    ),
    (".engine", ".plan", ".trt", ".tflite", ".mlmodel", ".mlpackage"): _OTHER_FRAMEWORK,
    (".h5", ".hdf5", ".keras", ".pb", ".msgpack"): _OTHER_FRAMEWORK,
    (".ipynb",): ("is a notebook", "call ampaudit.scan(model, inputs) in a cell, or: ampaudit lint {path}"),
    (".json", ".yaml", ".yml", ".toml"): (
        "is a configuration file",
        "give the model's directory, or a Python file",
    ),
}
_HUB = re.compile(r"(?:https?://huggingface\.co/)?([\w.-]+/[\w.-]+|[A-Za-z][\w.-]*-[\w.-]+)/?")


def refuse_other_kinds(path: Path) -> None:
    """Reject locations that are not a model by themselves.

    Raises:
        SourceError: The location is a TorchScript program, a pipeline of several models, an adapter without
            its base, or a layer of a Sentence Transformers model.
    """
    if path.is_file() and path.suffix in _ARCHIVES and _is_torchscript(path):
        raise SourceError(
            f"{describe_path(path)} is a TorchScript program, whose ops have no Python code to audit",
            hint="scan the Python model that it was made from, or save that with torch.export.save as .pt2",
        )
    if not path.is_dir():
        return
    if (path / PIPELINE).is_file():
        raise _pipeline(path)
    if (path / CONFIG_FILE).is_file():
        _check_config(path)
    elif (path / ADAPTER).is_file():
        raise _adapter(path)


def _is_torchscript(path: Path) -> bool:
    with os.fdopen(open_regular(path, SourceError), "rb") as stream:
        if stream.read(2) != b"PK":
            return False
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL))
        return _SCRIPTED in stream.read(_TAIL)


def _pipeline(path: Path) -> SourceError:
    """Return the error for a Diffusers pipeline, which suggests how to scan its models."""
    table = read_table(path / PIPELINE, SourceError)
    ways = []
    for name, entry in table.items():
        if "/" in name or not isinstance(entry, list) or not (path / name / CONFIG_FILE).is_file():
            continue
        is_transformers = entry[:1] == ["transformers"]
        ways.append(_command(path / name) if is_transformers else _file(path / name, entry[-1:]))
    ways.sort(key=lambda way: not way.startswith("ampaudit"))
    kind = describe(table.get("_class_name") or "several models")
    return SourceError(
        f"{describe_path(path)} is a Diffusers pipeline ({kind}), not one model",
        hint="scan its parts: " + ("; ".join(ways[:_PARTS_SHOWN]) or "none of them is here"),
    )


def _command(path: Path) -> str:
    return f"ampaudit scan {shell_quoted(describe_path(path))}"


def _file(path: Path, kind: list[Any]) -> str:
    """Describe a Python file that loads a Diffusers model, as code that is safe to paste."""
    name = describe(*kind or ("",))
    call = f"{name if name.isidentifier() else 'Model'}.from_pretrained({describe_path(path)!r})"
    return f"a Python file whose get_model() returns {call}, with example_inputs()"


def _adapter(path: Path) -> SourceError:
    """Return the error for a PEFT adapter, which suggests how to scan it."""
    base = read_table(path / ADAPTER, SourceError).get("base_model_name_or_path")
    what = describe(base or "a model that it does not name")
    return SourceError(
        f"{describe_path(path)} holds an adapter ({ADAPTER}) of {what}, not a whole model",
        hint="return PeftModel.from_pretrained(base, ADAPTER) from get_model() in a Python file, or merge "
        "them with merge_and_unload() and save_pretrained(DIR), and scan DIR",
    )


def _check_config(path: Path) -> None:
    table = read_raw_config(path)
    place = describe_path(path)
    if "_class_name" in table and "_diffusers_version" in table:
        raise SourceError(
            f"{place} is a {describe(table['_class_name'])} of Diffusers, whose inputs have no standard form",
            hint=f"scan {_file(path, [table['_class_name']])}",
        )
    if "model_type" not in table and "architectures" not in table and (path.parent / _MODULES).is_file():
        raise SourceError(
            f"{place} is a layer of a Sentence Transformers model",
            hint=f"scan the directory of the whole model: {_command(path.parent)}",
        )


def _needed_code(path: Path) -> str:
    """Return the code that a ``torch.save`` file needs, such as a class; empty if none."""
    try:
        open_checkpoint(path)
    except WeightsError as error:
        return str(error.__cause__) if isinstance(error.__cause__, CodeNeeded) else ""
    return ""


def not_a_model(location: str) -> SourceError:
    """Return the error for a location that no reader supports."""
    path = Path(location)
    name = describe(location)
    if not path.exists():
        hub = _HUB.fullmatch(location)
        hint = "check the path of the model"
        if hub:
            hint += f"; for a model of the Hub, run 'hf download {hub[1]} --local-dir DIR' and scan DIR"
        return SourceError(f"no such file or directory: {name}", hint=hint)
    if path.suffix.lower() in _PICKLED and (needed := _needed_code(path)):
        hint = "if you trust it, scan a Python file whose get_model() loads it with weights_only=False"
        return SourceError(f"{name} is no plain state_dict: {needed}", hint=hint)
    for suffixes, (kind, next_step) in _KINDS.items():
        if path.suffix.lower() in suffixes:
            hint = next_step.format(path=shell_quoted(describe_path(path)))
            return SourceError(f"{name} {kind}", hint=hint)
    return SourceError(f"{name} is not in a model format that ampaudit reads", hint=_FORMATS)
