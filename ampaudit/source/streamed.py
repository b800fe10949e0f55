"""Builds models without weights, and maps the tensors of a checkpoint into them."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ampaudit.checkpoint.header import TensorEntry
from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.checkpoint.open import Checkpoint
from ampaudit.checkpoint.write import write_safetensors
from ampaudit.core.errors import OutputError, WeightsError
from ampaudit.core.files import temporary_directory
from ampaudit.core.untrusted import MAX_MESSAGE, describe, describe_path
from ampaudit.source.float8_weights import is_dequantized
from ampaudit.trace.internals import Replacement, patched

__all__ = ["load_weights", "model_names", "with_mapped", "without_weights"]

_SHOWN = 3
_WIDENED = frozenset({"F16", "BF16"})


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Create parameters, but not buffers, on the meta device while active."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    with patched((Replacement(nn.Module, "register_parameter", on_meta),)):
        yield


def with_mapped(model: nn.Module, checkpoint: Checkpoint, *, renamed: bool) -> Callable[[torch.Tensor], None]:
    """Give a model the weights of a checkpoint, which stay on disk.

    Args:
        model: Model built under ``without_weights``.
        checkpoint: Safetensors checkpoint, whole or sharded.
        renamed: Whether to map names of a Hugging Face file to the model's.

    Returns:
        A function that frees the memory of a weight until its next use.

    Raises:
        WeightsError: A weight is missing, unexpected, of another shape, or joined from several tensors.
    """
    with _in_float32(checkpoint) as file:
        mapped = map_checkpoint(file)
    names = model_names(model, mapped.tensors) if renamed else {name: name for name in mapped.tensors}
    tensors: dict[str, torch.Tensor] = {}
    for name, target in names.items():
        if target in tensors:
            raise WeightsError(
                f"{checkpoint.path}: {target!r} is assembled from several tensors",
                hint="leave out --stream for this model",
            )
        tensors[target] = mapped.tensors[name]
    check_names(model, tensors, checkpoint.path, strict=not renamed)
    _assign(model, tensors)
    return mapped.drop


@contextlib.contextmanager
def _in_float32(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a float32 checkpoint to map: a temporary copy if weights are 16-bit or float8.

    The audit needs FP32 weights; in a file they take no memory. A mapped file needs no name, so it is removed
    at once and a killed process leaves nothing behind; on Windows it is removed at exit.
    """
    narrow = any(entry.dtype in _WIDENED for entry in checkpoint.entries.values())
    if not narrow and not is_dequantized(checkpoint):
        yield checkpoint.path
        return
    entries, pieces = [], []
    for part in checkpoint.parts:
        for entry in part.entries.values():
            wide = entry.dtype in _WIDENED
            entries.append(TensorEntry(entry.name, "F32" if wide else entry.dtype, entry.shape))
            values = part.pieces(entry.name)
            pieces.append((entry.name, (piece.float() for piece in values) if wide else values))
    try:
        with temporary_directory("ampaudit-stream-") as folder:
            if os.name == "nt":
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
            write_safetensors(folder / "widened.safetensors", entries, {}, pieces)
            yield folder / "widened.safetensors"
    except OSError as error:
        raise OutputError(
            f"cannot write a float32 copy of {checkpoint.path} to the temporary directory: {error.strerror}",
            hint="set TMPDIR to a directory with room for it",
        ) from error


def _assign(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Assign mapped tensors to parameters, keeping ties, and copy the others into buffers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    fresh = {
        id(parameters[name]): nn.Parameter(tensor, requires_grad=False)
        for name, tensor in tensors.items()
        if name in parameters and tensor.is_floating_point()
    }
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        if id(parameter) in fresh:
            model.get_submodule(owner)._parameters[leaf] = fresh[id(parameter)]
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in tensors:
                buffer.copy_(tensors[name])


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint whose names and shapes all match the model's.

    Raises:
        WeightsError: See ``open_checkpoint``; or names or shapes differ.
    """
    state = map_checkpoint(path).tensors
    check_names(model, state, path)
    model.load_state_dict(state, strict=False)


def check_names(
    model: nn.Module, state: Mapping[str, torch.Tensor], path: Path, *, strict: bool = True
) -> None:
    """Reject tensors that do not match the model's; one name suffices for tied tensors.

    Args:
        model: Model to load into.
        state: Tensors by the model's names.
        path: Path of the checkpoint, for the message.
        strict: Whether to reject tensors that the model lacks.

    Raises:
        WeightsError: Names or shapes differ.
    """
    expected = model.state_dict()
    missing = [n for n in expected if n not in state]
    extra = [n for n in state if n not in expected] if strict else []
    shapes = [
        f"{n} is {tuple(state[n].shape)}, the model has {tuple(expected[n].shape)}"
        for n in expected
        if n in state and expected[n].shape != state[n].shape
    ]
    for what, names in (("missing", _untied(model, missing)), ("unexpected", extra), ("shape", shapes)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            start = f"{describe_path(path)} does not match the model: {what}: "
            listed = describe(", ".join(names[:_SHOWN]), MAX_MESSAGE - len(start) - len(more))
            raise WeightsError(f"{start}{listed}{more}", hint="pass a checkpoint of this model")


def _untied(model: nn.Module, missing: list[str]) -> list[str]:
    """Return the missing names whose tensor is not loaded under another name."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    absent = set(missing)
    loaded = {id(t) for name, t in tensors.items() if name not in absent}
    return [name for name in missing if id(tensors.get(name)) not in loaded]


def model_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map the tensor names of a Hugging Face checkpoint to the model's, as Transformers does.

    Prefixes differ (``bert.encoder`` in one file, ``encoder`` in another), names have changed, and
    some parameters are joined from several tensors, which then all map to one name. A tensor that the model
    lacks keeps its own name.
    """
    state, prefix = model.state_dict(), str(getattr(model, "base_model_prefix", ""))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(cast(Any, model))
    except Exception:  # another version of transformers, or an unknown model
        return {name: _by_prefix(name, prefix, state) for name in names}
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def rename(name: str) -> str:
        target = str(rename_source_key(name, renamings, converters, prefix, state)[0])
        return target if target in state else _by_prefix(name, prefix, state)

    return {name: rename(name) for name in names}


def _by_prefix(name: str, prefix: str, state: dict[str, Any]) -> str:
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in state), name)
