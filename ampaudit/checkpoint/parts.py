"""Reads one file of a checkpoint, or tensors in memory, in pieces of a few megabytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch

from ampaudit.checkpoint.header import TORCH_NAMES, TensorEntry, read_header
from ampaudit.core.errors import WeightsError
from ampaudit.core.session import Progress
from ampaudit.core.untrusted import describe, describe_path

__all__ = [
    "PIECE",
    "RING",
    "InMemory",
    "Part",
    "RescaledPart",
    "SafetensorsFile",
    "WatchedPart",
    "clipped",
    "count_megabytes",
    "dtype_of",
    "flat_tensor",
    "misfit",
    "type_name",
]

_MAX_EXPANDED = 1 << 20  # elements of a tensor with more than its storage

PIECE = 1 << 19  # elements: 2 MiB of float32, which stay in the cache while they are cast and summed
RING = 8  # buffers, used in turn
_TYPE_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


class Part(Protocol):
    """The tensors of one file, in the order of their bytes."""

    label: str
    metadata: dict[str, str]
    entries: dict[str, TensorEntry]

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the tensor's values in flat pieces; each is valid until ``RING`` more were requested."""


class WatchedPart:
    """A part that tells how many bytes are read from it."""

    def __init__(self, part: Part, on_read: Callable[[int], None]) -> None:
        self.label, self.metadata, self.entries = part.label, part.metadata, part.entries
        self._part, self._on_read = part, on_read

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the pieces of the part."""
        for piece in self._part.pieces(name):
            yield piece
            self._on_read(piece.nbytes)


class RescaledPart:
    """A part with some tensors multiplied by powers of two, whose exponents are given by their names."""

    def __init__(self, part: Part, powers: Mapping[str, int]) -> None:
        self.label, self.metadata, self.entries = part.label, part.metadata, part.entries
        self._part, self._powers = part, powers

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the pieces of the part.

        Raises:
            WeightsError: A product is not exact.
        """
        power = self._powers.get(name, 0)
        for piece in self._part.pieces(name):
            scaled = piece * 2.0**power if power else piece
            if power and not torch.equal(scaled * 2.0**-power, piece):
                what = f"{describe(self.label)}: {describe(name)!r} times 2^{power} is not exact"
                raise WeightsError(what, hint="leave out --rescale")
            yield scaled


def count_megabytes(phase: str, total: int, on_progress: Progress) -> Callable[[int], None]:
    """Return a function that adds up bytes and reports them in megabytes."""
    done = 0

    def on_read(size: int) -> None:
        nonlocal done
        done = min(done + size, total)  # a tensor may be read again
        on_progress(phase, done // 10**6, total // 10**6)

    return on_read


class SafetensorsFile:
    """A safetensors file, read instead of mapped, so that its pages do not count as process memory.

    Raises:
        WeightsError: See ``read_header``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = path.name
        header = read_header(path)
        self.metadata = header.metadata
        self.entries = {entry.name: entry for entry in header.entries}
        self._data_start = header.data_start
        self._ring = [torch.empty(0, dtype=torch.uint8)] * RING
        self._turn = 0

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield pieces in the buffers of a ring."""
        entry = self.entries[name]
        dtype = dtype_of(entry.dtype)
        unit = 1 if dtype is None else dtype.itemsize
        whole = entry.size // unit
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(self._data_start + entry.start)
                for start in range(0, whole, PIECE):
                    piece = self._buffer(min(PIECE, whole - start) * unit)
                    _fill(stream, piece.numpy().data, self.path)
                    yield piece if dtype is None else piece.view(dtype)
        except OSError as error:
            raise WeightsError(
                f"{describe_path(self.path)}: {error.strerror}", hint="check the disk"
            ) from error

    def _buffer(self, size: int) -> torch.Tensor:
        """Return the next buffer of the ring, cut to a size."""
        self._turn = (self._turn + 1) % RING
        if self._ring[self._turn].numel() < size:
            self._ring[self._turn] = torch.empty(size, dtype=torch.uint8)
        return self._ring[self._turn][:size]


class InMemory:
    """Tensors in memory: of a model, or of a ``.pt`` file that torch has mapped."""

    def __init__(self, label: str, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
        self.label, self.metadata, self.tensors = label, metadata, tensors
        self.entries: dict[str, TensorEntry] = {}
        for name, tensor in tensors.items():
            dtype = type_name(tensor.dtype, f"{describe(label)}: {describe(name)!r}")
            self.entries[name] = TensorEntry(name, dtype, tuple(tensor.shape))

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield slices of the tensor, or of a contiguous copy."""
        whole = self.tensors[name].detach().cpu().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # the one element of a tensor may have any stride
        for start in range(0, flat.numel(), PIECE):
            yield flat[start : start + PIECE]


def dtype_of(name: str) -> torch.dtype | None:
    """Return the torch dtype of a safetensors type; ``None`` if torch has none."""
    dtype: torch.dtype | None = getattr(torch, TORCH_NAMES.get(name, ""), None)
    return None if name == "F4" else dtype


def clipped(values: torch.Tensor, smallest: float, largest: float) -> torch.Tensor:
    """Clip the magnitude of finite values to the limits; 0, inf and NaN stay as they are."""
    magnitude = values.abs().clamp(smallest, largest)
    limited = torch.copysign(magnitude, values)
    return torch.where(values.isfinite() & (values != 0), limited, values)


def type_name(dtype: torch.dtype, what: str) -> str:
    """Return the safetensors name of a torch dtype.

    Raises:
        WeightsError: Safetensors has no such type.
    """
    name = _TYPE_NAMES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise WeightsError(f"{what} is {dtype}, which safetensors cannot hold", hint="convert or drop it")
    return name


def flat_tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes as a tensor that shares them; torch itself refuses none at all."""
    return torch.frombuffer(view, dtype=dtype) if len(view) else torch.empty(0, dtype=dtype)


def misfit(
    sizes: Sequence[int], strides: Sequence[int], offset: int, stored: int, expanded: int = _MAX_EXPANDED
) -> str:
    """Return why a tensor does not lie in its storage, or repeats it beyond reason; empty if it fits.

    All numbers are elements and not negative; there is one stride per size. A tensor may have as many
    elements as are ``stored``, and in any case those ``expanded``.
    """
    elements = math.prod(sizes)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if offset > stored or (elements and last >= stored):
        return f"needs more than the {stored:,} values that are stored"
    if elements > max(stored, expanded):
        return f"claims {elements:,} values, of which {stored:,} are stored"
    return ""


def _fill(stream: FileIO, view: memoryview, path: Path) -> None:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise WeightsError(f"{describe_path(path)}: was truncated while it was read", hint="try again")
        done += count
