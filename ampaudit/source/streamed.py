"""Builds models without weights, and maps the tensors of a checkpoint into them."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from ampaudit.checkpoint.header import TensorEntry
from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.checkpoint.open import Checkpoint
from ampaudit.checkpoint.write import write_safetensors
from ampaudit.core.errors import OutputError, WeightsError
from ampaudit.core.files import temporary_directory
from ampaudit.source.float8_weights import is_dequantized
from ampaudit.source.weights import check_names, model_names
from ampaudit.trace.internals import Replacement, patched

__all__ = ["with_mapped", "without_weights"]

_WIDENED = frozenset({"F16", "BF16"})


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Create parameters on the meta device while active; buffers are created as usual."""
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
        model: made under ``without_weights``.
        checkpoint: safetensors, whole or in shards.
        renamed: whether its names are those of a Hugging Face file, which may differ from the model's.

    Returns:
        A function that frees the memory of a weight until its next use.

    Raises:
        WeightsError: a weight is missing, unexpected, of another shape, or joined from several tensors.
    """
    with _in_float32(checkpoint) as file:
        mapped = map_checkpoint(file)
    names = model_names(model, mapped.tensors) if renamed else {name: name for name in mapped.tensors}
    given: dict[str, torch.Tensor] = {}
    for name, own in names.items():
        if own in given:
            raise WeightsError(
                f"{checkpoint.path}: {own!r} is assembled from several tensors",
                hint="leave out --stream for this model",
            )
        given[own] = mapped.tensors[name]
    check_names(model, given, checkpoint.path, strict=not renamed)
    _assign(model, given)
    return mapped.drop


@contextlib.contextmanager
def _in_float32(checkpoint: Checkpoint) -> Iterator[Path]:
    """Write a float32 copy of a checkpoint with 16-bit or float8 weights to a temporary file, to be mapped.

    The audit needs FP32 weights; as a file they need no memory. A mapped file needs no name, so it has
    none that a killed process could leave behind; but Windows keeps the name, and removes it at the end.
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


def _assign(model: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Assign mapped tensors to parameters, tied ones together, and copy others into buffers."""
    own = dict(model.named_parameters(remove_duplicate=False))
    fresh = {
        id(own[name]): nn.Parameter(tensor, requires_grad=False)
        for name, tensor in given.items()
        if name in own and tensor.is_floating_point()
    }
    for name, parameter in own.items():
        owner, _, leaf = name.rpartition(".")
        if id(parameter) in fresh:
            model.get_submodule(owner)._parameters[leaf] = fresh[id(parameter)]
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in given:
                buffer.copy_(given[name])
