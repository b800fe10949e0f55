"""Choices in an ONNX model: the nodes that choose, and outputs compared where the same was chosen.

A box, a label or a token is either the same as before or a different one. The distance between coordinates
or scores of different ones says nothing about the accuracy of a conversion.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ampaudit.export.onnx.types import CHOOSING, COMPARING, is_float32, on_last_axis
from ampaudit.source.onnx.names import bodies_of, plain_domain

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["breaks", "comparable_outputs", "nodes_before_choices", "orderings"]

Outputs = Mapping[str, torch.Tensor]


def nodes_before_choices(model: ir.Model, steps: int) -> set[ir.Node]:
    """Return the choosing nodes, and the nodes whose values reach one in at most ``steps`` nodes."""
    near = dict.fromkeys(filter(_chooses, model.graph.all_nodes()), 0)
    pending = deque(near)
    while pending:
        node = pending.popleft()
        if near[node] == steps:
            continue
        returned = (value for body in bodies_of(node) for value in body.outputs)
        for value in (*node.inputs, *returned):
            producer = None if value is None or not is_float32(value) else value.producer()
            if producer is not None and producer not in near:
                near[producer] = near[node] + 1
                pending.append(producer)
    return set(near)


def _chooses(node: ir.Node) -> bool:
    chooses = node.op_type in CHOOSING | COMPARING and plain_domain(node.domain) == ""
    return chooses and any(map(is_float32, node.inputs))


def orderings(model: ir.Model) -> dict[str, str]:
    """Return the operator of each output that holds the sorted choices of TopK or NonMaxSuppression.

    A TopK along another axis than the last is left out: its order counts.
    """
    operators = {}
    for value in model.graph.outputs:
        producer = value.producer()
        while producer is not None and producer.op_type in ("Cast", "Identity"):
            producer = producer.inputs[0].producer() if producer.inputs[0] is not None else None
        if producer is None or is_float32(value):
            continue
        if producer.op_type == "NonMaxSuppression" or (producer.op_type == "TopK" and on_last_axis(producer)):
            operators[str(value.name)] = producer.op_type
    return operators


def comparable_outputs(
    ours: Outputs, exact: Outputs, ordered: Mapping[str, str] | None = None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pair outputs: integers unchanged, and floats where the integers that they belong to agree.

    Choices in another order, or of another number, are paired by value, and so are the floats beside them. A
    choice without a partner counts as different. An output that is inf or NaN where the original's is finite
    is paired as a whole.

    Args:
        ours: Outputs by name.
        exact: Outputs of the original by name.
        ordered: Operators of sorted outputs; see ``orderings``.
    """
    ordered = ordered or {}
    pairs = {name: (ours[name], exact[name]) for name in exact}
    equal = []
    for name in [name for name, (_, theirs) in pairs.items() if _is_choice(theirs)]:
        mine, theirs = ours[name], exact[name]
        others = [other for other in pairs if other == name or other not in ordered]
        if mine.shape == theirs.shape and ordered.get(name) == "TopK":
            depth, rows = theirs.ndim, _equal_rows(_in_groups(mine), _in_groups(theirs))
            alike = [other for other in ordered if exact[other].shape == theirs.shape]
            for other in others if len(alike) == 1 else [name]:
                pair = pairs[other]
                if all(tensor.shape[:depth] == theirs.shape for tensor in pair):
                    flat = pair[0].flatten(0, depth - 1), pair[1].flatten(0, depth - 1)
                    pairs[other] = _at_rows(flat, rows)
        elif mine.shape[1:] == theirs.shape[1:] and (mine.shape != theirs.shape or name in ordered):
            rows = _equal_rows(mine, theirs)
            for other in others:
                pair = pairs[other]
                if pair[0].ndim and [*map(len, pair)] == [len(mine), len(theirs)]:
                    pairs[other] = _at_rows(pair, rows)
        elif mine.shape == theirs.shape:
            equal.append(mine == theirs)
    for name, pair in pairs.items():
        if breaks(ours[name], exact[name]):
            pairs[name] = ours[name], exact[name]
        elif pair[1].is_floating_point():
            pairs[name] = _where(equal, *pair)
    return pairs


def breaks(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether an output is inf or NaN where the original's is finite."""
    if ours.shape != exact.shape:
        return bool(exact.isfinite().all()) and not bool(ours.isfinite().all())
    return bool((exact.isfinite() & ~ours.isfinite()).any())


def _is_choice(tensor: torch.Tensor) -> bool:
    return tensor.ndim > 0 and not tensor.is_floating_point()


def _in_groups(indices: torch.Tensor) -> torch.Tensor:
    """Return rows of (group, index) for choices along the last axis."""
    groups = torch.arange(indices.shape[:-1].numel()).repeat_interleave(indices.shape[-1])
    return torch.stack([groups, indices.flatten()], 1)


def _where(
    equal: Sequence[torch.Tensor], ours: torch.Tensor, exact: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements that belong to equal choices; all of them if there are none."""
    if not equal:
        return ours, exact
    mask = torch.ones_like(exact, dtype=torch.bool)
    for each in equal:
        if each.shape != exact.shape[: each.ndim]:
            each = each.flatten(1).all(1) if each.ndim > 1 else each  # a box beside its indices
        if ours.shape == exact.shape and each.shape == exact.shape[: each.ndim]:
            mask &= each.reshape(*each.shape, *[1] * (exact.ndim - each.ndim))
    return (ours, exact) if mask.all() or not mask.any() else (ours[mask], exact[mask])


def _equal_rows(ours: torch.Tensor, exact: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the positions of rows that both tensors contain, each row once."""
    places = defaultdict[str, deque[int]](deque)
    for place, row in enumerate(exact.tolist()):
        places[str(row)].append(place)
    paired = [
        (place, places[str(row)].popleft()) for place, row in enumerate(ours.tolist()) if places[str(row)]
    ]
    return [mine for mine, _ in paired], [theirs for _, theirs in paired]


def _at_rows(
    pair: tuple[torch.Tensor, torch.Tensor], rows: tuple[list[int], list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return paired rows; of integers also one that differs for each that has no partner."""
    ours, exact = (tensor[places] for tensor, places in zip(pair, rows, strict=True))
    if exact.is_floating_point():
        return ours, exact
    alone = (max(map(len, pair)) - len(exact), *exact.shape[1:])
    return torch.cat([ours, ours.new_zeros(alone)]), torch.cat([exact, exact.new_ones(alone)])
