"""Opens the source that a location names.

Adding a source: write ``from_xyz(...) -> ModelSource`` in its own file, and a branch in ``_build``.
"""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ampaudit.checkpoint import MANIFEST, ONNX, PROGRAM
from ampaudit.checkpoint.open import PICKLED, open_checkpoint
from ampaudit.checkpoint.pickled import CodeNeeded
from ampaudit.core.errors import InputError, SourceError, UsageError, WeightsError
from ampaudit.core.files import states_of
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.source_config import CONFIG_FILE, SourceConfig
from ampaudit.core.text import shell_quoted
from ampaudit.core.untrusted import describe, describe_path, open_regular, read_table
from ampaudit.source.inputs import with_inputs
from ampaudit.source.interface import ModelSource
from ampaudit.source.model_config import ADAPTER, PIPELINE, read_raw_config
from ampaudit.source.processor import KINDS
from ampaudit.source.python_file import from_python
from ampaudit.source.streamed import load_weights, with_weights_on_disk, without_weights

_MODULES = "modules.json"
_PARTS_SHOWN = 4
_TAIL = 1 << 20  # bytes at the end of an archive that hold its member names
_TORCHSCRIPT_MARK = b"/code/__torch__"
_ARCHIVES = (".pt", ".pth", ".ts", ".torchscript", ".jit", ".ptc", ".bin", "")
_FORMATS = "give file.py, file.py:factory, package.module:factory, a model directory, or a .pt2 or .onnx file"
_OTHER_FRAMEWORK = ("is not a PyTorch model", "scan the PyTorch model from which it was converted")
_KINDS = {
    (".safetensors", *PICKLED): (
        "holds weights, not a model",
        "ampaudit scan model.py --weights {path}, where get_model() in model.py builds the model",
    ),
    (".gguf",): (
        "holds the quantized weights of another runtime",
        "scan the Hugging Face directory from which it was converted",
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


def open_source(location: str, options: SourceConfig) -> ModelSource:
    """Load the model at a location.

    The location is ``file.py``, ``file.py:factory``, ``package.module:factory``, a directory with
    config.json, a ``.pt2`` or ``.onnx`` file, or a converted directory.

    Raises:
        SourceError, InputError, WeightsError: The model, its inputs or weights cannot be loaded.
    """
    options.check()
    head, colon, _ = location.rpartition(":")
    model = Path(head if colon and head.endswith(".py") else location)
    _check_inputs(location, model, options)
    paths = (model, options.weights, options.inputs, options.text)
    files = states_of([path for path in paths if path is not None])
    # tensors by position, which replace those of the model's own inputs; for ONNX, they have names
    tensors = (
        options.inputs if options.inputs is not None and options.inputs.suffix == ".safetensors" else None
    )
    tensors = None if model.suffix == ".onnx" else tensors
    opening = options if tensors is None else options.changed(inputs=None, batches=1)
    with without_weights() if options.stream else nullcontext():
        source = _build(location, opening)
    if options.stream:
        source = with_weights_on_disk(source, options)
    if tensors is not None:
        source = with_inputs(source, tensors)
    source.model.train(options.train)
    if options.weights is not None and not options.stream:
        load_weights(source.model, options.weights)
    return replace(source, files=files)


def _check_inputs(location: str, model: Path, options: SourceConfig) -> None:
    """Check that the options for inputs fit the model and each other, and that sample files exist."""
    for kind in KINDS:
        path = getattr(options, kind)
        if path is None:
            continue
        if options.inputs is not None:
            raise UsageError(f"--inputs and --{kind} both give inputs", hint="leave one out")
        if not (Path(location) / CONFIG_FILE).is_file():
            hint = "return inputs from example_inputs() in the model file, or pass --inputs FILE.py"
            raise UsageError(f"--{kind}: {describe(location)} is not a Hugging Face directory", hint=hint)
        if not (path.is_file() if kind == "text" else path.is_dir()):
            what = "file" if kind == "text" else "directory"
            raise InputError(f"--{kind} {describe_path(path)}: no such {what}", hint="check the path")
    for flag, value in (("--args", options.args), ("--input", options.input)):
        if value and (model.is_dir() or model.suffix in (".pt2", ".onnx")):
            hint = "leave it out; --inputs FILE passes your own inputs"
            raise UsageError(f"{flag} is for models in Python, not for {describe(str(model))}", hint=hint)
    if options.input and options.inputs is not None:
        raise UsageError("--input and --inputs both give inputs", hint="leave one out")


def _build(location: str, options: SourceConfig) -> ModelSource:
    """Build the model with the reader for its location."""
    path = Path(location)
    converted = (path / PROGRAM, path / ONNX) if (path / MANIFEST).is_file() else ()
    file = next(filter(Path.is_file, converted), path)
    if file == path:
        refuse_other_kinds(path)
        if path.is_dir():
            from ampaudit.source.huggingface import from_directory

            return from_directory(path, options, location)
    if file.suffix == ".onnx":
        try:
            from ampaudit.source.onnx.source import from_onnx
        except ModuleNotFoundError as error:
            what = f"{describe_path(file)}: reading ONNX needs the package {error.name or 'onnx'}"
            raise SourceError(what, hint="pip install 'ampaudit[onnx]'") from error
        source = from_onnx(file, options, location)
    elif file.suffix == ".pt2":
        from ampaudit.source.exported import from_exported

        source = from_exported(file, options, location)
    else:
        head, _, factory = location.rpartition(":")
        if path.suffix == ".py":
            return from_python(path, None, options, location)
        if head.endswith(".py"):
            return from_python(Path(head), factory, options, location)
        if head and factory.isidentifier():
            return from_python(head, factory, options, location)
        raise not_a_model(location)
    if file == path:
        return source
    dtype = read_table(path / MANIFEST, SourceError).get("dtype")  # ``ampaudit verify`` checks integrity
    low_precision = next((name for name in LOW_PRECISION_NAMES if name == dtype), None)
    return replace(source, kind="converted", dtype=low_precision)


def refuse_other_kinds(path: Path) -> None:
    """Reject locations that do not hold one whole model with Python code.

    Raises:
        SourceError: The location is a TorchScript program, a pipeline of several models, an adapter without
            its base, or a layer of a Sentence Transformers model.
    """
    if path.is_file() and path.suffix in _ARCHIVES and _is_torchscript(path):
        raise SourceError(
            f"{describe_path(path)} is a TorchScript program, whose ops have no Python code to audit",
            hint="scan the Python model behind it, or save that with torch.export.save as .pt2",
        )
    if (path / PIPELINE).is_file():
        raise _pipeline(path)
    if (path / CONFIG_FILE).is_file():
        table, place = read_raw_config(path), describe_path(path)
        if "_class_name" in table and "_diffusers_version" in table:
            kind = describe(table["_class_name"])
            raise SourceError(
                f"{place} is a {kind} of Diffusers, whose inputs have no standard form",
                hint=f"scan {_file(path, [table['_class_name']])}",
            )
        if "model_type" not in table and "architectures" not in table and (path.parent / _MODULES).is_file():
            raise SourceError(
                f"{place} is a layer of a Sentence Transformers model",
                hint=f"scan the directory of the whole model: {_command(path.parent)}",
            )
    elif (path / ADAPTER).is_file():
        base = read_table(path / ADAPTER, SourceError).get("base_model_name_or_path")
        what = describe(base or "a model that it does not name")
        raise SourceError(
            f"{describe_path(path)} holds an adapter ({ADAPTER}) of {what}, not a whole model",
            hint="return PeftModel.from_pretrained(base, ADAPTER) from get_model() in a Python file, or "
            "merge them with merge_and_unload() and save_pretrained(DIR), and scan DIR",
        )


def _is_torchscript(path: Path) -> bool:
    with os.fdopen(open_regular(path, SourceError), "rb") as stream:
        if stream.read(2) != b"PK":
            return False
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL))
        return _TORCHSCRIPT_MARK in stream.read(_TAIL)


def _pipeline(path: Path) -> SourceError:
    """Return the error for a Diffusers pipeline, with suggestions how to scan its models."""
    table = read_table(path / PIPELINE, SourceError)
    suggestions = [
        _command(path / name) if entry[:1] == ["transformers"] else _file(path / name, entry[-1:])
        for name, entry in table.items()
        if "/" not in name and isinstance(entry, list) and (path / name / CONFIG_FILE).is_file()
    ]
    suggestions.sort(key=lambda suggestion: not suggestion.startswith("ampaudit"))
    kind = describe(table.get("_class_name") or "several models")
    return SourceError(
        f"{describe_path(path)} is a Diffusers pipeline ({kind}), not one model",
        hint="scan its parts: " + ("; ".join(suggestions[:_PARTS_SHOWN]) or "none of them is here"),
    )


def _command(path: Path) -> str:
    return f"ampaudit scan {shell_quoted(describe_path(path))}"


def _file(path: Path, kind: list[Any]) -> str:
    """Describe a Python file that loads a Diffusers model; its code is safe to paste."""
    name = describe(*kind or ("",))
    call = f"{name if name.isidentifier() else 'Model'}.from_pretrained({describe_path(path)!r})"
    return f"a Python file whose get_model() returns {call}, with example_inputs()"


def _needed_code(path: Path) -> str:
    """Describe the code that a ``torch.save`` file needs, such as a class; empty if it needs none."""
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
    if path.suffix.lower() in PICKLED and (needed := _needed_code(path)):
        hint = "if you trust it, scan a Python file whose get_model() loads it with weights_only=False"
        return SourceError(f"{name} is not a plain state_dict: {needed}", hint=hint)
    for suffixes, (kind, next_step) in _KINDS.items():
        if path.suffix.lower() in suffixes:
            hint = next_step.format(path=shell_quoted(describe_path(path)))
            return SourceError(f"{name} {kind}", hint=hint)
    return SourceError(f"{name} is not in a model format that ampaudit reads", hint=_FORMATS)
