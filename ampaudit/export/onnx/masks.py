"""Finds constants that mask attention scores, and clamps those that the 16-bit format cannot hold.

A mask of -1e9 or of float32's lowest number means "no weight after the softmax". Any large negative
number means the same, so it may be replaced; data may not. A constant is a mask if all that is computed
from it, by moving, selecting, scaling or adding to scores, ends in a softmax.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ampaudit.export.onnx.types import MOVING, TensorOf, constant_of, is_float32
from ampaudit.source.onnx.names import STANDARD

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["ClampedMask", "clamp_masks"]

_ENDS = {"Softmax", "LogSoftmax"}
_THROUGH = MOVING | {"Add", "Sub", "Mul", "Div", "Max", "Min", "Cast", "CastLike", "Clip"}
_MAX_STEPS = 2000
_Put = Callable[["ir.TensorProtocol"], None]


@dataclass(frozen=True, slots=True)
class ClampedMask:
    """A constant that was clamped.

    Attributes:
        value: Value in the graph.
        lowest: Minimum of the original.
        restore: Function that restores the original.
    """

    value: ir.Value
    lowest: float
    restore: Callable[[], None]


def clamp_masks(model: ir.Model, dtype: torch.dtype, tensor_of: TensorOf) -> list[ClampedMask]:
    """Clamp the masks of a model, in place.

    The new minimum of a mask is half the format's lowest number, so that scores can be added, divided by the
    number of masks that are added to the same scores. A large magnitude matters: in a fully masked row, it
    absorbs the scores, as the original does.
    """
    import onnx_ir as ir

    masks: list[tuple[ir.Value, ir.TensorProtocol, set[ir.Node], _Put]] = []
    for value, constant, setter in _constants(model):
        ends = _softmaxes(value)  # first, as it reads no weights
        if ends is None:
            continue
        values = tensor_of(constant)
        lowered = values.to(dtype)
        if (lowered.isneginf() & values.isfinite()).any() and not lowered.isposinf().any():
            masks.append((value, constant, ends, setter))
    together = Counter(end for _, _, ends, _ in masks for end in ends)
    clamped_masks = []
    for value, constant, ends, setter in masks:
        lowest = torch.finfo(dtype).min / 2 / max(together[end] for end in ends)
        values = tensor_of(constant)
        beyond = values.to(dtype).isneginf() & values.isfinite()
        clamped = torch.where(beyond, torch.tensor(lowest, dtype=values.dtype), values)
        setter(ir.tensor(clamped.numpy(), name=str(value.name)))
        clamped_masks.append(ClampedMask(value, float(values[beyond].amin()), partial(setter, constant)))
    return clamped_masks


def _constants(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol, _Put]]:
    """Yield the stored float32 values, each with a function that replaces it."""
    import onnx_ir as ir

    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            if is_float32(value) and value.const_value is not None:
                yield value, value.const_value, lambda tensor, v=value: setattr(v, "const_value", tensor)  # type: ignore[misc]
        for node in graph:
            if node.op_type != "Constant" or not is_float32(node.outputs[0]):
                continue
            tensor = constant_of(node)
            assert tensor is not None

            def put(tensor: ir.TensorProtocol, node: ir.Node = node) -> None:
                node.attributes.clear()
                node.attributes["value"] = ir.AttrTensor("value", tensor)

            yield node.outputs[0], tensor, put


def _softmaxes(value: ir.Value) -> set[ir.Node] | None:
    """Return the softmax nodes that consume a value; ``None`` if some path from it ends elsewhere."""
    pending, visited = [value], {value}
    ends: set[ir.Node] = set()
    while pending:
        current = pending.pop()
        uses = list(current.uses())
        if not uses or current.is_graph_output() or len(visited) > _MAX_STEPS:
            return None
        for use in uses:
            node = use.node
            if node is None or node.domain not in STANDARD:
                return None
            if node.op_type in _ENDS:
                ends.add(node)
                continue
            if node.op_type not in _THROUGH or (node.op_type in ("Sub", "Div") and use.idx == 1):
                return None
            if not is_float32(node.outputs[0]):
                return None
            fresh = set(node.outputs) - visited
            visited |= fresh
            pending.extend(fresh)
    return ends
