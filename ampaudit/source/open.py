"""Opens the source that a location names.

Adding a source: write ``from_xyz(...) -> ModelSource`` in its own file, and a branch here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ampaudit.checkpoint.layout import MANIFEST, ONNX, PROGRAM
from ampaudit.checkpoint.open import open_checkpoint
from ampaudit.core.errors import InputError, SourceError, UsageError
from ampaudit.core.files import states_of
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe, describe_path, read_table
from ampaudit.source.interface import ModelSource
from ampaudit.source.model_config import CONFIG_FILE
from ampaudit.source.other_kinds import not_a_model, refuse_other_kinds
from ampaudit.source.processor import KINDS

__all__ = ["open_source"]


def open_source(location: str, options: SourceConfig) -> ModelSource:
    """Load the model at ``location``.

    Args:
        location: ``file.py``, ``file.py:factory``, ``package.module:factory``, a directory with
            config.json, a ``.pt2`` or ``.onnx`` file, or a converted directory.
        options: Number of batches, seed, weights and inputs.

    Raises:
        SourceError, InputError, WeightsError: The model, its inputs or weights cannot be loaded.
    """
    options.check()
    head, colon, _ = location.rpartition(":")
    model = Path(head if colon and head.endswith(".py") else location)
    _check_samples(location, options)
    _check_descriptions(model, options)
    read = [path for path in (model, options.weights, options.inputs, options.text) if path is not None]
    files = states_of(read)
    by_place = options.inputs is not None and options.inputs.suffix == ".safetensors"
    saved = options.inputs if by_place and model.suffix != ".onnx" else None
    opened = options if saved is None else options.changed(inputs=None, batches=1)
    source = _streamed(location, opened) if options.stream else _open(location, opened)
    if saved is not None:
        from ampaudit.source.inputs import with_inputs

        source = with_inputs(source, saved)
    source.model.train(options.train)
    if options.weights is not None and not options.stream:
        from ampaudit.source.streamed import load_weights

        load_weights(source.model, options.weights)
    return replace(source, files=files)


def _check_samples(location: str, options: SourceConfig) -> None:
    """Reject missing samples, and samples for models without a processor."""
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


def _check_descriptions(model: Path, options: SourceConfig) -> None:
    """Reject --args and --input for models that are not Python, and --input beside --inputs."""
    for flag, value in (("--args", options.args), ("--input", options.input)):
        if value and (model.is_dir() or model.suffix in (".pt2", ".onnx")):
            hint = "leave it out; --inputs FILE gives inputs of your own"
            raise UsageError(f"{flag} is for models in Python; {describe(str(model))} is none", hint=hint)
    if options.input and options.inputs is not None:
        raise UsageError("--input and --inputs both give inputs", hint="leave one out")


def _streamed(location: str, options: SourceConfig) -> ModelSource:
    """Load a source whose weights stay on disk."""
    from ampaudit.source.float8_weights import notes_on, open_weights
    from ampaudit.source.streamed import with_mapped, without_weights

    with without_weights():
        source = _open(location, options)
    if options.weights is not None and source.kind in ("python", "import", "huggingface"):
        weights = open_checkpoint(options.weights)
    elif source.kind == "huggingface":
        weights = open_weights(Path(location))
    else:
        raise UsageError(
            f"--stream: {location} has no weight files that could stay on disk",
            hint="pass --weights FILE.safetensors with a Python file, or give a Hugging Face directory",
        )
    release = with_mapped(source.model, weights, renamed=options.weights is None)
    return replace(source, release=release, notes=(*source.notes, *notes_on(weights)))


def _open(location: str, options: SourceConfig) -> ModelSource:
    path = Path(location)
    converted = (path / PROGRAM, path / ONNX) if (path / MANIFEST).is_file() else ()
    for file in filter(Path.is_file, converted):
        source = _open_graph(file, options, location)
        dtype = read_table(path / MANIFEST, SourceError).get("dtype")  # ``ampaudit verify`` checks integrity
        low_precision = next((name for name in LOW_PRECISION_NAMES if name == dtype), None)
        return replace(source, kind="converted", dtype=low_precision)
    refuse_other_kinds(path)
    if path.is_dir():
        from ampaudit.source.huggingface import from_directory

        return from_directory(path, options, location)
    if path.suffix in (".pt2", ".onnx"):
        return _open_graph(path, options, location)
    head, colon, factory = location.rpartition(":")
    from ampaudit.source.python_file import from_import_path, from_python_file

    if path.suffix == ".py":
        return from_python_file(path, None, options, location)
    if colon and head.endswith(".py"):
        return from_python_file(Path(head), factory, options, location)
    if colon and head and factory.isidentifier():
        return from_import_path(head, factory, options, location)
    raise not_a_model(location)


def _open_graph(path: Path, options: SourceConfig, location: str) -> ModelSource:
    if path.suffix == ".onnx":
        from ampaudit.source.onnx.source import from_onnx

        return from_onnx(path, options, location)
    from ampaudit.source.exported import from_exported

    return from_exported(path, options, location)
