"""Joins a traced model with its FP32 master weights and their 16-bit working copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.checkpoint.safetensors import clipped
from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import format_number, short_op
from ampaudit.trace.graph import Role, Site, Slot, TracedModel
from ampaudit.trace.opnames import mutated_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES, inexact

_NUMBERS = 3  # how many constants of an op are named
_SMALL = 16  # elements up to which a constant tensor is compared
_ROUNDED = 2.0**-7  # relative: a constant tensor in 16 bits is FP32's, rounded
_MASKING = having("constant", "fills") | {"mul", "rsub", "sub"}
Release = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """A tensor whose dtype in the converted model differs from its master's."""

    node: str  # name of the node with its value: a placeholder (stored in 16 bits) or a weight cast
    placeholder: str  # name of the master's placeholder
    name: str  # of the parameter, buffer or constant
    dtype: torch.dtype  # of the working copy


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A graph with casts, its FP32 masters (the model's own tensors) and its working copies.

    ``release`` frees a master's memory until its next use, where masters stay on disk.
    """

    traced: TracedModel
    masters: dict[str, torch.Tensor]
    copies: dict[str, WeightCopy]
    release: Release | None = None

    def unrounded(self, placeholder: str, master: torch.Tensor) -> torch.Tensor:
        """Return the master of a working copy, clipped if the policy clips weights before rounding."""
        clip = self.traced.clip if placeholder in self.copies else None
        return clipped(master, clip.min_positive, clip.max_finite) if clip is not None else master

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The size of the FP32 masters and of all floats in 16 bits, in bytes; tied tensors count once."""
        floats = {id(tensor): tensor for tensor in self.masters.values() if inexact(tensor)}
        low = {key: t for key, t in floats.items() if t.dtype in LOW_PRECISION_DTYPES}
        replaced = {id(self.masters[c.placeholder]) for c in self.copies.values() if c.node == c.placeholder}
        copies = {
            (id(self.masters[c.placeholder]), c.dtype): self.masters[c.placeholder].numel() * c.dtype.itemsize
            for c in self.copies.values()
        }
        return {
            "master": sum(t.nbytes for key, t in floats.items() if key not in low),
            "working": sum(copies.values()) + sum(t.nbytes for key, t in low.items() if key not in replaced),
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


@dataclass(frozen=True, slots=True)
class CodeDifference:
    """The first difference between two traces."""

    site: SiteId  # the op in the 16-bit trace or, if it is missing there, in the FP32 trace
    layer: str  # path of the op's layer
    source: SourceLine | None  # line of the op
    caller: SourceLine | None  # the user's line that calls it, if that is another one
    low: str | None  # the op in 16 bits with its constants; ``None`` if it is missing
    fp32: str | None  # the op in FP32 with its constants; ``None`` if it is missing
    lines: int  # number of lines that differ, counted in each layer
    # all sites of the 16-bit trace that the FP32 trace lacks or runs with other constants
    low_sites: tuple[SiteId, ...] = ()


@dataclass(frozen=True, slots=True)
class _Op:
    """An op of the model's code, without details that depend on the precision alone."""

    site: Site
    base: str
    constants: tuple[Any, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.site.layer, self.base

    def __str__(self) -> str:
        scalars = [c.item() if isinstance(c, torch.Tensor) and c.dim() == 0 else c for c in self.constants]
        numbers = [format_number(number) for number in scalars if isinstance(number, float)]
        return f"{self.base}({', '.join(numbers[:_NUMBERS])})" if numbers else self.base


def first_difference(low: TracedModel, fp32: TracedModel) -> CodeDifference | None:
    """Find the first op that only one trace has, or whose constants differ.

    Casts do not count, since the FP32 run widens them. Mask values come last, since any number that is low
    enough masks.
    """
    differences = list(_differences(_ops(low), _ops(fp32)))
    if not differences:
        return None
    low_op, fp32_op = min((pair for pair, _ in differences), key=_masks)
    either_op = low_op or fp32_op
    assert either_op is not None
    site = either_op.site
    ops = [first or second for (first, second), _ in differences]
    lines = {(op.site.source, op.site.layer) for op in ops if op is not None}
    return CodeDifference(
        site=site.id,
        layer=site.layer,
        source=site.source,
        caller=site.caller,
        low=str(low_op) if low_op is not None else None,
        fp32=str(fp32_op) if fp32_op is not None else None,
        lines=len(lines),
        low_sites=tuple(op.site.id for _, ops in differences for op in ops),
    )


_Pair = tuple[_Op | None, _Op | None]


def _differences(first: list[_Op], second: list[_Op]) -> Iterator[tuple[_Pair, list[_Op]]]:
    """Yield each difference: where it begins, and all its ops in 16 bits."""
    matcher = SequenceMatcher(None, [op.key for op in first], [op.key for op in second], autojunk=False)
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if tag == "equal":
            for low_op, fp32_op in zip(first[start:end], second[other_start:other_end], strict=True):
                pairs = list(zip(low_op.constants, fp32_op.constants, strict=False))
                if len(low_op.constants) != len(fp32_op.constants) or not all(_same(*pair) for pair in pairs):
                    yield (low_op, fp32_op), [low_op]
        else:
            low = first[start] if start < end else None
            fp32 = second[other_start] if other_start < other_end else None
            yield (low, fp32), first[start:end]


def _masks(pair: _Pair) -> bool:
    low, fp32 = pair
    if low is None or fp32 is None or low.base not in _MASKING:
        return False
    extremes = {torch.finfo(dtype).min for dtype in LOW_PRECISION_DTYPES}
    return any(isinstance(value, float) and value in extremes for value in low.constants)


def _ops(traced: TracedModel) -> list[_Op]:
    """List the ops of the model's code in order."""
    constants = [p.node for p in traced.placeholders if p.slot is Slot.CONSTANT]
    tensors = {name: (t,) for name in constants if (t := traced.tensors[name]).numel() <= _SMALL}
    nodes = {node.name: node for node in traced.graph.nodes}
    return [
        _Op(site, short_op(site.op).split(".")[0], tuple(_constants(nodes[site.node], tensors)))
        for site in traced.sites
        if site.facts is not None and not site.role.converts
    ]


def _constants(node: fx.Node, tensors: Mapping[str, tuple[torch.Tensor]]) -> Iterator[Any]:
    """Yield the numbers, strings and small constant tensors among the arguments of an op."""
    stack: list[Any] = [node.args, dict(sorted(node.kwargs.items()))]
    while stack:
        value = stack.pop(0)
        if isinstance(value, fx.Node):
            yield from tensors.get(value.name, ())
        elif isinstance(value, list | tuple):
            stack[:0] = value
        elif isinstance(value, dict):
            stack[:0] = value.values()
        elif isinstance(value, bool | int | float | complex | str):
            yield value


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape or first.dtype.is_complex or second.dtype.is_complex:
            return first.shape == second.shape
        return torch.allclose(first.double(), second.double(), rtol=_ROUNDED, atol=0.0, equal_nan=True)
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return type(first) is type(second) and bool(first == second)


def casts_of(node: fx.Node, sites: Mapping[str, Site]) -> list[fx.Node] | None:
    """Return the casts of a weight and of its views; ``None`` if anything else uses it."""
    casts: list[fx.Node] = []
    for user in node.users:
        role = sites[user.name].role if user.name in sites else None
        is_value = user.all_input_nodes[0] is node  # and not only the shape or the dtype of another tensor
        inner = None
        if is_value and role is Role.VIEW:
            inner = casts_of(user, sites)
        elif is_value and role is not None and role.converts and not any(map(_writes, user.users)):
            inner = [user]
        if inner is None:
            return None
        casts += inner
    return casts


def _writes(node: fx.Node) -> bool:
    """Return whether a call may write to an argument, which must not be a stored weight."""
    return isinstance(node.target, OpOverload) and bool(mutated_arguments(node.target))
