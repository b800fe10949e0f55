"""The registry of transfer functions: from the spans of an op's inputs to the span of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ampaudit.bounds.span import Axes, Span, exactly, finite
from ampaudit.formats import FORMATS
from ampaudit.trace.flow import Flow

__all__ = ["FLOAT32_ULP", "TRANSFERS", "DuplicateTransfer", "OpCall", "accumulated", "shaped", "transfer"]

FLOAT32_ULP = 2.0**-24  # half of an ulp, relative: the unit roundoff of float32
ELEMENTARY = 2.0**-20  # sixteen of them: what libraries promise for exp, tanh and the like, and more


class DuplicateTransfer(Exception):
    """Two transfer functions for one op."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op with what is known about its inputs.

    Attributes:
        node: of the graph.
        given: arguments by ATen's names; nodes where a value is meant.
        spans: what is known about each node.
        tensors: weights and constants whose values are known, by node, before the graph rounds them.
        flow: the graph around it.
        limit: largest finite value of the 16-bit format: sharper bounds are sought beyond it only.
    """

    node: fx.Node
    given: Mapping[str, Any]
    spans: Mapping[fx.Node, Any]
    tensors: Mapping[fx.Node, torch.Tensor]
    flow: Flow
    limit: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output, the first of several."""
        value = self.node.meta["val"]
        first = value[0] if isinstance(value, list | tuple) else value
        return tuple(int(n) for n in first.shape)

    def span(self, name: str) -> Span:
        """Of an argument: a node's, or the one of a Python number, which some kernels round first."""
        value = self.given[name]
        if isinstance(value, fx.Node):
            found: Span = self.spans[value]
            return found
        number = exactly(torch.tensor(float(value), dtype=torch.float64))
        dtype = getattr(self.node.meta["val"], "dtype", None)
        form = FORMATS.get(str(dtype).removeprefix("torch."))
        return number if form is None else number.widened(form.eps / 2, form.min_subnormal / 2)

    def has(self, name: str) -> bool:
        """Whether an argument is given and not None."""
        return self.given.get(name) is not None

    def loose(self, name: str) -> tuple[float, float]:
        """How far a known tensor may be from what the graph uses: relative and absolute, by its rounding."""
        dtype = self.given[name].meta["val"].dtype
        form = FORMATS.get(str(dtype).removeprefix("torch."))
        if form is None or self.tensors[self.given[name]].dtype is dtype:
            return 0.0, 0.0
        return form.eps / 2, form.min_subnormal / 2

    def tensor(self, name: str) -> torch.Tensor | None:
        """The known value of an argument."""
        value = self.given.get(name)
        return self.tensors.get(value) if isinstance(value, fx.Node) else None


Transfer = Callable[[OpCall], Span | list[Span]]
TRANSFERS: dict[str, Transfer] = {}


def transfer(*ops: str) -> Callable[[Transfer], Transfer]:
    """Register a function for ops by base name (``add`` covers every overload and ``add_``)."""

    def register(function: Transfer) -> Transfer:
        for op in ops:
            if op in TRANSFERS:
                raise DuplicateTransfer(op)
            TRANSFERS[op] = function
        return function

    return register


def accumulated(terms: int) -> float:
    """n*u / (1 - n*u): relative error of a float32 sum of n terms in any order (Higham 2002, 3.1)."""
    product = terms * FLOAT32_ULP
    return product / (1.0 - product) if product < 0.5 else float("inf")


def shaped(call: OpCall, low: torch.Tensor, high: torch.Tensor, norms: Axes | None = None) -> Span:
    """The span of an op's output from ends that broadcast to it."""
    shape = call.shape
    rank = len(shape)

    def fit(ends: torch.Tensor) -> torch.Tensor:
        return ends.reshape((1,) * (rank - ends.ndim) + tuple(ends.shape[max(ends.ndim - rank, 0) :]))

    return Span(shape, finite(fit(low), -1), finite(fit(high), 1), dict(norms or {}))
