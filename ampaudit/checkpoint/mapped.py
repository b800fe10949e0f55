"""Maps the tensors of a checkpoint into memory, and releases their pages on request."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ampaudit.checkpoint.archive import map_privately
from ampaudit.checkpoint.header import read_header
from ampaudit.checkpoint.open import open_checkpoint
from ampaudit.checkpoint.parts import InMemory, dtype_of
from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import describe, describe_path

__all__ = ["MappedWeights", "map_checkpoint"]

_DROP_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """Tensors by name; safetensors files are mapped privately, so writes do not change the file."""

    tensors: dict[str, torch.Tensor]
    _mappings: dict[int, tuple[mmap.mmap, int, int]] = field(default_factory=dict)

    def drop(self, tensor: torch.Tensor) -> None:
        """Release the memory of a tensor, whose values are read again on next use.

        Anything that was written to the tensor is lost.
        """
        place = self._mappings.get(tensor.data_ptr())
        if place is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        mapping, start, length = place
        begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # only whole pages of the tensor
        end = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Keep releasing the memory of all tensors while active, for code that reads them in any order."""
        done = threading.Event()
        mappings = {mapping for mapping, _, _ in self._mappings.values()}

        def work() -> None:
            while not done.wait(_DROP_SECONDS):
                for mapping in mappings:
                    mapping.madvise(mmap.MADV_DONTNEED)

        thread = threading.Thread(target=work, name="ampaudit-dropper", daemon=True)
        if hasattr(mmap, "MADV_DONTNEED"):
            thread.start()
        try:
            yield
        finally:
            done.set()
            if thread.is_alive():
                thread.join()


def map_checkpoint(path: Path) -> MappedWeights:
    """Map every tensor of a checkpoint without reading it.

    Raises:
        WeightsError: A tensor has a type that torch lacks, or see ``open_checkpoint``.
    """
    checkpoint = open_checkpoint(path)
    weights = MappedWeights({})
    for part in checkpoint.parts:
        if isinstance(part, InMemory):
            weights.tensors.update(part.tensors)
            continue
        file = checkpoint.path.parent / part.label
        header, mapping = read_header(file), map_privately(file, WeightsError)
        for entry in header.entries:
            dtype = dtype_of(entry.dtype)
            if dtype is None:
                what = f"torch has no type for {describe(entry.name)!r} ({entry.dtype})"
                raise WeightsError(f"{describe_path(file)}: {what}")
            if entry.size == 0:
                weights.tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
                continue
            start = header.data_start + entry.start
            flat = torch.frombuffer(mapping, dtype=dtype, count=entry.elements, offset=start)
            if start % dtype.itemsize:
                flat = flat.clone()  # kernels may want aligned values
            else:
                weights._mappings[flat.data_ptr()] = (mapping, start, entry.size)
            weights.tensors[entry.name] = flat.view(entry.shape)
    return weights
