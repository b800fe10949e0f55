"""Follows the values of weights and constants through a graph, until they are rounded."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from ampaudit.bounds.interval import Interval, from_tensor
from ampaudit.bounds.stored import any_value, can_represent, format_of, widened_once
from ampaudit.bounds.transfers import VANISHING, KnownTensor, RegisteredTransfer
from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import CAST_OPS, base_name
from ampaudit.trace.values import sizes_of

__all__ = ["KnownWeights"]

MAX_COMPUTED = 1 << 22  # elements up to which a constant is computed


class KnownWeights(dict[fx.Node, KnownTensor]):
    """Known values by node, followed through copies, views and casts; constants through every exact op."""

    def __init__(self) -> None:
        super().__init__()
        self._constants: set[fx.Node] = set()

    def given(self, node: fx.Node, tensor: torch.Tensor, dtype: torch.dtype, *, constant: bool) -> None:
        """Record a placeholder's tensor, which the graph may hold in another dtype."""
        if constant and tensor.numel() <= MAX_COMPUTED:
            self[node] = KnownTensor(tensor.to(dtype))
            self._constants.add(node)
        else:
            self[node] = _cast(KnownTensor(tensor), tensor.dtype, dtype) or KnownTensor(tensor.to(dtype))

    def follow(self, node: fx.Node, entry: RegisteredTransfer) -> bool:
        """Compute a node's value, if that is exact; return whether it is known."""
        sources, value = node.all_input_nodes, node.meta.get("val")
        op = overload_of(node.target)
        if op is None or not isinstance(value, torch.Tensor) or not all(source in self for source in sources):
            return False
        if self._computable(node, entry) and 0 <= math.prod(sizes_of(value)) <= MAX_COMPUTED:
            return self._compute(node)
        if base_name(op) in CAST_OPS and sources:
            found = _cast(self[sources[0]], sources[0].meta["val"].dtype, value.dtype)
            if found is not None:
                self[node] = found
            return found is not None
        return entry.moves and len(sources) == 1 and self._move(node)

    def _computable(self, node: fx.Node, entry: RegisteredTransfer) -> bool:
        """Return whether a value is constant and identical on every device."""
        if not all(source in self._constants for source in node.all_input_nodes):
            return False
        floats = [near.meta["val"].is_floating_point() for near in (node, *node.all_input_nodes)]
        return entry.exact or (entry.integers and not any(floats))

    def _compute(self, node: fx.Node) -> bool:
        found = self._result(node)
        if found is None:
            return False
        self[node] = KnownTensor(found)
        self._constants.add(node)
        return True

    def _move(self, node: fx.Node) -> bool:
        found = self._result(node)
        if found is None:
            return False
        self[node] = replace(self[node.all_input_nodes[0]], tensor=found)
        return True

    def _result(self, node: fx.Node) -> torch.Tensor | None:
        try:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: self[source].tensor)
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            return None
        return found if isinstance(found, torch.Tensor) else None

    def peak(self, node: fx.Node) -> float:
        """Return the largest magnitude of a known value before rounding; infinite for NaN."""
        tensor = self[node].tensor
        if not tensor.numel():
            return 0.0
        if tensor.is_complex():
            return math.inf
        low, high = torch.aminmax(tensor.to(torch.int8) if tensor.dtype is torch.bool else tensor)
        found = max(-float(low), float(high))
        return math.inf if math.isnan(found) else found

    def interval(self, node: fx.Node) -> Interval:
        """Return the interval of a known value as the graph holds it."""
        known, dtype = self[node], node.meta["val"].dtype
        tensor = known.tensor
        if tensor.is_complex():
            return any_value(tuple(tensor.shape), dtype)
        found = from_tensor(tensor)
        if tensor.ndim == 2 and tensor.is_floating_point() and tensor.numel():
            lengths = {a: torch.linalg.vector_norm(known.wide, dim=a, keepdim=True) for a in (0, 1)}
            wide = {a: n.double() * (1 + 2.0**-10) + VANISHING * tensor.shape[a] for a, n in lengths.items()}
            found = replace(found, norms=wide)
        if known.relative or known.absolute:
            found = widened_once(found, known.relative, known.absolute)
        form = format_of(dtype)
        return found.clipped(form.max) if form is not None else found


def _cast(known: KnownTensor, source: torch.dtype, dtype: torch.dtype) -> KnownTensor | None:
    """Return a weight after a cast between floating-point dtypes; ``None`` for other casts."""
    if source is dtype or can_represent(dtype, source):
        return known
    if not (source.is_floating_point and dtype.is_floating_point):
        return None
    return known.rounded_to(dtype)
