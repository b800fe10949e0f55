"""Builds models without weights, and maps the tensors of a checkpoint into them."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from operator import methodcaller
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampaudit.checkpoint.open import Checkpoint, map_checkpoint, open_checkpoint, weights_error
from ampaudit.checkpoint.safetensors import (
    PIECE,
    Part,
    TensorEntry,
    dtype_of,
    type_name,
    write_safetensors,
)
from ampaudit.core.errors import OutputError, UsageError, WeightsError
from ampaudit.core.files import temporary_directory
from ampaudit.core.source_config import CONFIG_FILE, SourceConfig
from ampaudit.core.untrusted import MAX_MESSAGE, describe, describe_path
from ampaudit.source.dequantize import note_on_dequantized, scaled
from ampaudit.source.interface import ModelSource
from ampaudit.source.model_config import QUANTIZED_HINT, Quantization, read_quantization
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.internals import Replacement, patched

_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
# dtypes of other quantized weights
_CODES = frozenset({"I8", "U8", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"})
_DOWNLOAD_HINT = "download the directory again, with all of its files"
_PACKED = ("_packed", ".qweight")
# scales of activations, which a dequantized layer does not need
_ACTIVATIONS = ("activation_scale", "input_scale", "input_scale_ub", "input_zero_point", "output_scale")
_SHOWN = 3


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


def with_weights_on_disk(source: ModelSource, options: SourceConfig) -> ModelSource:
    """Map the weights of a source that was built under ``without_weights``; they stay on disk.

    Raises:
        UsageError: The source has no weight files.
        WeightsError: A weight is missing, unexpected, of another shape, or assembled from several tensors.
    """
    if source.kind == "huggingface":
        checkpoint = open_weights(Path(source.location), options.weights)
    elif source.kind in ("python", "import") and options.weights is not None:
        checkpoint = open_checkpoint(options.weights)
    else:
        raise UsageError(
            f"--stream: {source.location} has no weight files that could stay on disk",
            hint="pass --weights FILE.safetensors with a Python file, or give a Hugging Face directory",
        )
    renamed = options.weights is None  # names of a Hugging Face file are mapped to the model's
    names = model_names(source.model, checkpoint.entries) if renamed else {}
    with _in_dtypes_of(source.model, names, checkpoint) as file:
        mapped = map_checkpoint(file)
    tensors: dict[str, Tensor] = {}
    for name, tensor in mapped.tensors.items():
        target = names.get(name, name)
        if target in tensors:
            raise WeightsError(
                f"{checkpoint.path}: {target!r} is assembled from several tensors",
                hint="leave out --stream for this model",
            )
        tensors[target] = tensor
    before, assigning = named_tensors(source.model), partialmethod(nn.Module.load_state_dict, assign=True)
    with patched((Replacement(nn.Module, "load_state_dict", assigning),)):
        missing, unexpected = _load_state_dict(source.model, tensors, checkpoint.path)
    _restore(source.model, before, keep_ties=not renamed)
    missing = _without_value(source.model, missing)
    _reject(checkpoint.path, missing=missing, unexpected=[] if renamed else unexpected)
    return replace(source, release=mapped.drop, notes=(*source.notes, *notes_on(checkpoint)))


@contextlib.contextmanager
def _in_dtypes_of(model: nn.Module, names: Mapping[str, str], checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a checkpoint to map, in the dtypes of the parameters: a temporary copy if they differ.

    The copy is on disk so that the cast weights take no memory. It is removed as soon as it is mapped, so
    that a killed process leaves nothing behind; on Windows it is removed at exit.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    dtypes = {
        name: parameter.dtype
        for name, entry in checkpoint.entries.items()
        if (parameter := parameters.get(names.get(name, name))) is not None
        and parameter.dtype is not dtype_of(entry.dtype)
    }
    if not dtypes and not _float8_parts(checkpoint):
        yield checkpoint.path
        return
    entries, pieces = [], []
    for part in checkpoint.parts:
        for entry in part.entries.values():
            name, values = entry.name, part.pieces(entry.name)
            dtype = dtypes.get(name)
            kind = entry.dtype if dtype is None else type_name(dtype, name)
            entries.append(TensorEntry(name, kind, entry.shape))
            pieces.append((name, values if dtype is None else map(methodcaller("to", dtype), values)))
    try:
        with temporary_directory("ampaudit-stream-") as folder:
            if os.name == "nt":
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
            write_safetensors(folder / "cast.safetensors", entries, {}, pieces)
            yield folder / "cast.safetensors"
    except OSError as error:
        raise OutputError(
            f"cannot write a copy of {checkpoint.path} to the temporary directory: {error.strerror}",
            hint="set TMPDIR to a directory with room for it",
        ) from error


def _restore(model: nn.Module, before: Mapping[str, Tensor], *, keep_ties: bool) -> None:
    """Restore ties and dtypes after mapped tensors were assigned, and copy buffers, which may be written.

    Tied tensors may have different values in the file. With ``keep_ties``, all get the last, as with
    ``load_state_dict``; otherwise they become separate, as with Transformers.
    """
    loaded: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model).items():
        old = before.get(name, tensor)
        if tensor is old:
            continue
        if not isinstance(tensor, nn.Parameter):
            tensor = tensor.to(old.dtype, copy=True)
        elif tensor.dtype is not old.dtype:
            tensor = nn.Parameter(tensor.detach().to(old.dtype), tensor.requires_grad)
        loaded[id(old)] = tensor
    for name, old in before.items():
        if id(old) in loaded:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            table: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
            if keep_ties or table[leaf] is old or torch.equal(table[leaf], loaded[id(old)]):
                table[leaf] = loaded[id(old)]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # holds its weights twice
            module._init_flat_weights()


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint with the model's ``load_state_dict``, which may convert those of older versions.

    Raises:
        WeightsError: See ``open_checkpoint``; or names, shapes or dtypes do not fit the model.
    """
    missing, unexpected = _load_state_dict(model, map_checkpoint(path).tensors, path)
    _reject(path, missing=_without_value(model, missing), unexpected=unexpected)


def _load_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], path: Path
) -> tuple[Sequence[str], Sequence[str]]:
    """Call the model's ``load_state_dict`` and return the missing and the unexpected names."""
    try:
        return model.load_state_dict(state, strict=False) or ((), ())
    except Exception as error:  # of torch, or of the model's code
        _reject(path, shape=_other_shapes(model, state))
        what = describe(" ".join(f"{type(error).__name__}: {error}".split()), MAX_MESSAGE)
        raise WeightsError(
            f"{describe_path(path)}: the model's load_state_dict fails: {what}",
            hint="call it with the same checkpoint to see the full traceback, or pass --debug",
        ) from error


def _without_value(model: nn.Module, missing: Collection[str]) -> list[str]:
    """Return the missing names whose tensor the file does not hold under another name."""
    tensors = named_tensors(model)
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    # files of tensors have no extra state
    expected = [name for name in missing if not name.endswith("_extra_state")]
    return [name for name in expected if id(tensors.get(name)) not in loaded]


def _other_shapes(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    return [
        f"{name} is {tuple(state[name].shape)}, the model has {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in state and not is_lazy(tensor) and tensor.shape != state[name].shape
    ]


def _reject(path: Path, **differences: Sequence[str]) -> None:
    """Raise an error that lists the tensors which do not match the model, if there are any."""
    start = f"{describe_path(path)} does not match the model: "
    room = (MAX_MESSAGE - len(start)) // max(1, sum(map(bool, differences.values())))
    parts = []
    for what, names in differences.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown = describe(", ".join(names[:_SHOWN]), room - len(f"{what}: {more}; "))
            parts.append(f"{what}: {shown}{more}")
    if parts:
        raise WeightsError(start + "; ".join(parts), hint=_advice(**differences))


def _advice(missing: Sequence[str] = (), unexpected: Sequence[str] = (), shape: Sequence[str] = ()) -> str:
    """Suggest removing the prefix of a wrapper, such as ``module.``, if that is the only difference."""
    prefixes = {name.removesuffix(missing[0]) for name in unexpected if missing and name.endswith(missing[0])}
    for prefix in prefixes:
        prefixed = all(name.startswith(prefix) for name in unexpected)
        if prefixed and not shape and {prefix + name for name in missing} <= set(unexpected):
            return f"remove the prefix {describe(prefix)!r} from the checkpoint's names"
    return "pass a checkpoint of this model"


def model_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map the tensor names of a Hugging Face checkpoint to the model's, as Transformers does.

    Prefixes differ (``bert.encoder`` in one file, ``encoder`` in another), and names change between versions.
    Several tensors map to one name if the model joins them in one parameter. A tensor that the model lacks
    keeps its name.
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


@dataclass(frozen=True, slots=True)
class _Weight:
    """A float8 weight and the names of the tensors that belong to it."""

    codes: str
    scale: str
    zero: str | None
    others: tuple[str, ...]


class _Float8Part:
    """A checkpoint part that presents its float8 weights as float32 and hides their scales.

    ``weights`` and ``tensors`` are those of the whole checkpoint, since the scale of a weight may be in
    another file. ``block`` is the size of the blocks with one scale each; ``None`` infers it from the shape
    of the scales.
    """

    def __init__(
        self,
        part: Part,
        weights: Mapping[str, _Weight],
        tensors: Mapping[str, Tensor],
        block: tuple[int, int] | None,
        path: Path,
    ) -> None:
        self.label, self.metadata = part.label, part.metadata
        self._part, self._tensors, self._block, self._path = part, tensors, block, path
        self.weights = {name: weights[name] for name in part.entries if name in weights}
        beside = {name for weight in weights.values() for name in (weight.scale, weight.zero, *weight.others)}
        self.entries = {
            name: TensorEntry(name, "F32", entry.shape) if name in weights else entry
            for name, entry in part.entries.items()
            if name not in beside
        }

    def values(self, name: str) -> Tensor:
        """Dequantize a weight.

        Raises:
            WeightsError: Its scales do not fit its shape, or are not finite.
        """
        weight = self.weights[name]
        scale = self._tensors[weight.scale]
        scale = scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale  # exponents
        if not scale.float().isfinite().all():
            what = f"{describe(weight.scale)!r}, the scale of a weight, holds NaN or infinity"
            raise weights_error(self._path, what, _DOWNLOAD_HINT)
        zero = self._tensors[weight.zero] if weight.zero is not None else None
        try:
            return scaled(self._tensors[name], scale, self._block, zero)
        except ValueError as error:
            raise weights_error(self._path, f"{describe(name)!r} has {error}", _DOWNLOAD_HINT) from error

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor piece by piece; a float8 weight is dequantized as a whole."""
        if name in self.weights:
            yield from self.values(name).reshape(-1).split(PIECE)
        else:
            yield from self._part.pieces(name)


def open_weights(directory: Path, other: Path | None = None) -> Checkpoint:
    """Open the weights of a model directory, with float8 weights dequantized to float32.

    With ``other``, that checkpoint is opened instead, as it is.

    Raises:
        WeightsError: See ``open_checkpoint``; or quantized weights cannot be dequantized.
        SourceError: See ``read_quantization``.
    """
    if other is not None:
        return open_checkpoint(other)
    checkpoint = open_checkpoint(directory)
    quantization, entries = read_quantization(directory), checkpoint.entries
    codes = [name for name, entry in entries.items() if entry.dtype in _FLOAT8]
    weights = {weight.codes: weight for name in codes if (weight := _weight(name, entries)) is not None}
    if quantization is not None:
        _check_quantized(checkpoint, quantization, codes, weights)
    if not weights:
        return checkpoint
    for weight in weights.values():
        expected = {weight.scale, weight.zero, *weight.others}
        for name in entries:
            beside = name.startswith(f"{weight.codes}_") and weight.codes.endswith(".weight")
            if beside and name not in expected:  # such as the order of its columns
                what = f"it is not known how {describe(weight.codes)!r} is stored with {describe(name)!r}"
                raise weights_error(checkpoint.path, what, QUANTIZED_HINT)
    tensors = map_checkpoint(checkpoint.path).tensors
    block = quantization.block if quantization is not None else None
    parts = [_Float8Part(part, weights, tensors, block, checkpoint.path) for part in checkpoint.parts]
    widened = sum(entry.size for part in parts for entry in part.entries.values())
    widened -= sum(entry.size for entry in entries.values())
    return replace(checkpoint, parts=tuple(part for part in parts if part.entries), widened=widened)


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Map the tensors of a checkpoint into memory and dequantize those in float8."""
    tensors = map_checkpoint(checkpoint.path).tensors
    plain = {name: part.values(name) for part in _float8_parts(checkpoint) for name in part.weights}
    return {name: plain[name] if name in plain else tensors[name] for name in checkpoint.entries}


def notes_on(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a note with the number of dequantized layers; empty if there are none."""
    layers = {name.rpartition(".")[0] for part in _float8_parts(checkpoint) for name in part.weights}
    return (note_on_dequantized("fp8", len(layers)),) if layers else ()


def _float8_parts(checkpoint: Checkpoint) -> list[_Float8Part]:
    return [part for part in checkpoint.parts if isinstance(part, _Float8Part)]


def _weight(name: str, names: Collection[str]) -> _Weight | None:
    """Find the scale of a float8 tensor by the naming of known packages; ``None`` if it has none."""
    layer = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    scales = (f"{name}_scale_inv", f"{name}_scale", f"{layer}scale", f"{layer}qscale_weight")
    scale = next((scale for scale in scales if scale in names), None)
    if scale is None:
        return None
    zero = f"{name}_zero_point" if f"{name}_zero_point" in names else None
    others = tuple(other for kind in _ACTIVATIONS if (other := f"{layer}{kind}") in names)
    return _Weight(name, scale, zero, others)


def _check_quantized(
    checkpoint: Checkpoint, quantization: Quantization, codes: list[str], weights: Mapping[str, _Weight]
) -> None:
    """Reject quantized weights in other formats than float8, and float8 weights without a scale."""
    beside = {name for weight in weights.values() for name in (weight.scale, weight.zero)}
    for name, entry in checkpoint.entries.items():
        if name not in beside and (entry.dtype in _CODES or name.endswith(_PACKED)):
            what = f"{describe(name)!r} is stored in {entry.dtype}; only weights in float8 are dequantized"
            raise weights_error(checkpoint.path, what, QUANTIZED_HINT)
    zeros = {weight.zero for weight in weights.values()}
    bare = next((name for name in codes if name not in weights and name not in zeros), None)
    if bare is not None:
        what = f"{describe(bare)!r} is in float8, and its scale ({describe(bare)}_scale_inv) is missing"
        raise weights_error(checkpoint.path, what, _DOWNLOAD_HINT)
    if not codes:
        what = f"{CONFIG_FILE} asks for {describe(quantization.quant_method)!r}, and no tensor is in float8"
        hint = f"remove quantization_config from {CONFIG_FILE} if the weights are not quantized"
        raise weights_error(checkpoint.path, what, hint)
