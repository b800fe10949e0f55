"""The tensors of a model as a checkpoint, and in which dtype a plan stores each."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ampaudit.checkpoint.layout import SINGLE
from ampaudit.checkpoint.open import Checkpoint
from ampaudit.checkpoint.parts import InMemory, type_name
from ampaudit.export.fold import FoldedGraph
from ampaudit.trace.converted import identity
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.graph import Slot

__all__ = ["checkpoint_of", "planned_types"]


def checkpoint_of(model: nn.Module) -> Checkpoint:
    """The model's state_dict; of tied tensors the first, the other names in the metadata.

    That is how ``safetensors.torch.save_model`` does it, so that its ``load_model`` reads the file.
    """
    tensors: dict[str, torch.Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    metadata = {"format": "pt"}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue  # extra state that a module makes for itself
        key = identity(tensor)
        if tensor.numel() and key in first:
            metadata[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor
    return Checkpoint(Path(SINGLE), (InMemory(SINGLE, tensors, metadata),), None, {})


def planned_types(model: nn.Module, deployed: FoldedGraph) -> dict[str, tuple[str, str]]:
    """For each parameter or buffer that the graph uses: how it is stored, and why, under all of its names."""
    stored: dict[int, tuple[str, str]] = {}
    originals = named_tensors(model)
    for place in deployed.placeholders:
        if place.slot in (Slot.INPUT, Slot.CONSTANT) or place.name not in originals:
            continue
        original = originals[place.name]
        dtype = place.dtype or original.dtype
        rounded = dtype != original.dtype
        why = "every use takes it in 16 bits" if rounded else "the policy uses it in float32"
        stored[id(original)] = (type_name(dtype, place.name), why)
    return {name: stored[id(tensor)] for name, tensor in originals.items() if id(tensor) in stored}
