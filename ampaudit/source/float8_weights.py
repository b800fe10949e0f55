"""Opens the weights of a model directory, and dequantizes float8 weights to float32."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ampaudit.checkpoint.header import TensorEntry
from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.checkpoint.open import Checkpoint, open_checkpoint, weights_in
from ampaudit.checkpoint.parts import PIECE, Part
from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import describe, describe_path
from ampaudit.source.model_config import CONFIG_FILE, UNREAD_HINT, Quantization, read_quantization
from ampaudit.source.stored_formats import scaled
from ampaudit.source.stored_weights import dequantized_note

__all__ = ["is_dequantized", "notes_on", "open_weights", "tensors_of"]

_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
_CODES = frozenset({"I8", "U8", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"})  # dtypes of other quantized weights
_AGAIN = "download the directory again, with all of its files"
_PACKED = ("_packed", ".qweight")
# scales of activations, which a dequantized layer does not need
_ACTIVATIONS = ("activation_scale", "input_scale", "input_scale_ub", "input_zero_point", "output_scale")


@dataclass(frozen=True, slots=True)
class _Weight:
    """A float8 weight and the names of the tensors that belong to it."""

    codes: str
    scale: str
    zero: str | None
    others: tuple[str, ...]


class _Float8Part:
    """A checkpoint part that presents its float8 weights as float32 and hides their scales.

    Args:
        part: Part with the float8 codes.
        weights: Float8 weights of the whole checkpoint, by name.
        tensors: Tensors of the whole checkpoint; a scale may lie in another file than its weight.
        block: Size of the blocks with one scale each; ``None`` to infer it from the shape of the scales.
        path: Path shown in error messages.
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
            raise _unread(self._path, what, _AGAIN)
        zero = self._tensors[weight.zero] if weight.zero is not None else None
        try:
            return scaled(self._tensors[name], scale, self._block, zero)
        except ValueError as error:
            raise _unread(self._path, f"{describe(name)!r} has {error}", _AGAIN) from error

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor piece by piece; a float8 weight is dequantized at once."""
        if name in self.weights:
            yield from self.values(name).reshape(-1).split(PIECE)
        else:
            yield from self._part.pieces(name)


def open_weights(directory: Path, other: Path | None = None) -> Checkpoint:
    """Open the weights of a model directory, with float8 weights dequantized to float32.

    Args:
        directory: Model directory.
        other: Checkpoint to open unchanged instead.

    Raises:
        WeightsError: See ``open_checkpoint``; or quantized weights cannot be dequantized.
        SourceError: See ``read_quantization``.
    """
    if other is not None:
        return open_checkpoint(other)
    checkpoint = open_checkpoint(weights_in(directory))
    quantization, entries = read_quantization(directory), checkpoint.entries
    codes = [name for name, entry in entries.items() if entry.dtype in _FLOAT8]
    weights = {weight.codes: weight for name in codes if (weight := _weight(name, entries)) is not None}
    if quantization is not None:
        _check_read(checkpoint, quantization, codes, weights)
    if not weights:
        return checkpoint
    for weight in weights.values():
        _check_siblings(checkpoint.path, weight, entries)
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


def is_dequantized(checkpoint: Checkpoint) -> bool:
    """Return whether any tensor of a checkpoint is dequantized."""
    return any(True for _ in _float8_parts(checkpoint))


def notes_on(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a note with the number of dequantized layers; empty if there are none."""
    layers = {name.rpartition(".")[0] for part in _float8_parts(checkpoint) for name in part.weights}
    return (dequantized_note("fp8", len(layers)),) if layers else ()


def _float8_parts(checkpoint: Checkpoint) -> Iterator[_Float8Part]:
    return (part for part in checkpoint.parts if isinstance(part, _Float8Part))


def _weight(name: str, names: Collection[str]) -> _Weight | None:
    """Find the scale of a float8 tensor under the names used by known packages; ``None`` if it has none."""
    layer = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    scales = (f"{name}_scale_inv", f"{name}_scale", f"{layer}scale", f"{layer}qscale_weight")
    scale = next((scale for scale in scales if scale in names), None)
    if scale is None:
        return None
    zero = f"{name}_zero_point" if f"{name}_zero_point" in names else None
    others = tuple(other for kind in _ACTIVATIONS if (other := f"{layer}{kind}") in names)
    return _Weight(name, scale, zero, others)


def _check_read(
    checkpoint: Checkpoint, quantization: Quantization, codes: list[str], weights: Mapping[str, _Weight]
) -> None:
    """Reject quantized weights in other formats than float8, and float8 weights without a scale."""
    beside = {name for weight in weights.values() for name in (weight.scale, weight.zero)}
    for name, entry in checkpoint.entries.items():
        if name not in beside and (entry.dtype in _CODES or name.endswith(_PACKED)):
            what = f"{describe(name)!r} is stored in {entry.dtype}; only weights in float8 are dequantized"
            raise _unread(checkpoint.path, what, UNREAD_HINT)
    zeros = {weight.zero for weight in weights.values()}
    bare = next((name for name in codes if name not in weights and name not in zeros), None)
    if bare is not None:
        what = f"{describe(bare)!r} is in float8, and its scale ({describe(bare)}_scale_inv) is missing"
        raise _unread(checkpoint.path, what, _AGAIN)
    if not codes:
        what = f"{CONFIG_FILE} asks for {describe(quantization.quant_method)!r}, and no tensor is in float8"
        hint = f"remove quantization_config from {CONFIG_FILE} if the weights are not quantized"
        raise _unread(checkpoint.path, what, hint)


def _check_siblings(path: Path, weight: _Weight, names: Collection[str]) -> None:
    """Reject a weight that cannot be decoded by its scale alone, such as one with reordered columns."""
    expected = {weight.scale, weight.zero, *weight.others}
    for name in names:
        if name.startswith(f"{weight.codes}_") and weight.codes.endswith(".weight") and name not in expected:
            what = f"it is not known how {describe(weight.codes)!r} is stored with {describe(name)!r}"
            raise _unread(path, what, UNREAD_HINT)


def _unread(path: Path, what: str, hint: str) -> WeightsError:
    return WeightsError(f"{describe_path(path)}: {what}", hint=hint)
