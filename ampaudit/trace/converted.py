"""Joins a traced model with its FP32 master weights and their 16-bit working copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ampaudit.policy.schema import Constants
from ampaudit.trace.graph import Role, Slot, TracedModel
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["ConvertedModel", "Release", "WeightCopy", "attach_weights", "clipped", "identity"]

Release = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """A tensor whose dtype in the converted model differs from its master's.

    Attributes:
        node: Name of the node with its value: a placeholder (stored in 16 bits) or a weight cast.
        placeholder: Name of the master's placeholder.
        name: Name of the parameter, buffer or constant.
        dtype: Dtype of the working copy.
    """

    node: str
    placeholder: str
    name: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A graph with casts, its FP32 masters (the model's own tensors) and its working copies.

    ``release`` frees a master's memory until its next use, where masters stay on disk.
    """

    traced: TracedModel
    masters: dict[str, torch.Tensor]
    copies: dict[str, WeightCopy]
    release: Release | None = None

    def working(self, node: str) -> torch.Tensor:
        """Return the working copy for a node, rounded from its master to nearest even."""
        copy = self.copies[node]
        return self.unrounded(copy.placeholder, self.masters[copy.placeholder].detach()).to(copy.dtype)

    def unrounded(self, placeholder: str, master: torch.Tensor) -> torch.Tensor:
        """Return the master of a working copy, clipped if the policy clips weights before rounding."""
        clip = self.traced.clip if placeholder in self.copies else None
        return clipped(master, clip) if clip is not None else master

    def graph_module(self) -> fx.GraphModule:
        """Return the converted graph as a module; its inputs are ``arguments`` of a batch."""
        return fx.GraphModule({}, self.traced.graph)

    def arguments(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return values for every placeholder: weights in their stored dtype, then the batch's tensors."""
        remaining = iter(inputs)
        values: list[torch.Tensor] = []
        for place in self.traced.placeholders:
            if place.slot is Slot.INPUT:
                value = next(remaining)
                values.append(value.to(place.dtype) if value.is_floating_point() else value)
            elif place.node in self.copies:
                values.append(self.working(place.node))
            else:
                values.append(self.masters[place.node].detach())
        return values

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The size of the FP32 masters and of everything in 16 bits, in bytes; tied tensors count once."""
        masters, low_precision = (
            {id(t): t.nbytes for t in self.masters.values() if (t.dtype in LOW_PRECISION_DTYPES) is low}
            for low in (False, True)
        )
        copies = {
            (id(self.masters[c.placeholder]), c.dtype): self.masters[c.placeholder].numel() * c.dtype.itemsize
            for c in self.copies.values()
        }
        return {
            "master": sum(masters.values()),
            "working": sum(copies.values()) + sum(low_precision.values()),
        }


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key shared by tensors with the same values in the same memory, such as tied weights."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def attach_weights(traced: TracedModel, release: Release | None = None) -> ConvertedModel:
    """Find the weights that are stored or cast in 16 bits; copies are made when a run needs them."""
    copies: dict[str, WeightCopy] = {}
    for place in traced.placeholders:
        tensor = traced.tensors.get(place.node)
        if tensor is not None and place.dtype is not None and place.dtype != tensor.dtype:
            copies[place.node] = WeightCopy(place.node, place.node, place.name, place.dtype)
    nodes: dict[str, Any] = {node.name: node for node in traced.graph.nodes}
    for site in traced.sites:
        if site.role is Role.WEIGHT_CAST and site.dtype is not None and site.weight is not None:
            source = nodes[site.node].args[0].name
            if source not in copies and traced.tensors[source].is_floating_point():
                copies[site.node] = WeightCopy(site.node, source, site.weight, site.dtype)
    return ConvertedModel(traced, dict(traced.tensors), copies, release)


def clipped(values: torch.Tensor, limits: Constants) -> torch.Tensor:
    """Clip the magnitude of finite values to the limits; 0, inf and NaN stay as they are."""
    magnitude = values.abs().clamp(limits.min_positive, limits.max_finite)
    limited = torch.copysign(magnitude, values)
    return torch.where(values.isfinite() & (values != 0), limited, values)
