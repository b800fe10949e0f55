"""Measures the rounding errors of a backward pass: of each op's gradients, of sums, and of all together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ampaudit.core.text import short_op
from ampaudit.run.backends import Float32Backend, rounded
from ampaudit.run.backward.backward import BackwardPass, GradientObserver, GradientPair
from ampaudit.run.backward.custom_backward import FaultSource
from ampaudit.run.backward.tape import TapeEntry
from ampaudit.run.backward.vjp import vjp
from ampaudit.run.sensitivity.error_tape import finite_difference
from ampaudit.run.step import Step, widened_tensor
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["ErrorPass", "GradientErrors"]

# ops whose derivative jumps: a rounding that carries a value over the edge changes a gradient as a whole
_PIECEWISE = frozenset(
    "relu relu_ relu6 leaky_relu prelu rrelu threshold hardtanh hardswish hardsigmoid hardshrink softshrink "
    "clamp clamp_min clamp_max abs maximum minimum fmax fmin max min amax amin sort topk median "
    "max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d l1_loss hinge_embedding_loss margin_ranking_loss".split()
)


class GradientErrors(GradientObserver):
    """The errors that rounding adds in a backward pass.

    Args:
        parameters: by placeholder of a trainable parameter, the parameter; tied ones have several.

    Attributes:
        shares: by op and input, the op's gradient in 16 bits minus that in FP32 from the same values.
        sums: by node, the same for adding up several shares.
        jumps: by op and input, what values on the other side of an edge in 16 bits change in a gradient.
    """

    def __init__(self, parameters: Mapping[fx.Node, int]) -> None:
        self._parameters = parameters
        self.shares: dict[tuple[fx.Node, fx.Node], torch.Tensor] = {}
        self.sums: dict[fx.Node, torch.Tensor] = {}
        self.jumps: dict[tuple[fx.Node, fx.Node], torch.Tensor] = {}
        self._arrived: dict[fx.Node, int] = defaultdict(int)
        self._complete: dict[int, list[GradientPair]] = defaultdict(list)

    def made(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Count the shares of a sum."""
        self._arrived[of] += 1
        return pair[1]

    def complete(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Note the error of a sum, and the gradient of a parameter."""
        additions = self._arrived[node] - 1
        if additions > 0 and dtype in LOW_PRECISION_DTYPES:
            error = finite_difference(rounded(pair[0], dtype), widened_tensor(pair[0]))
            self.sums[node] = error * math.sqrt(additions)
        if node in self._parameters:
            self._complete[self._parameters[node]].append(pair)
        return pair[1]

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """FP32's gradients of the parameters."""
        return {key: _total(pairs, 0) for key, pairs in self._complete.items()}

    @property
    def relative_error(self) -> float:
        """Return the squared error of all parameters' gradients relative to their squares; inf if broken."""
        squares = [
            torch.stack([(wide - _total(pairs, 1)).square().sum(), wide.square().sum()])
            for pairs in self._complete.values()
            for wide in [_total(pairs, 0)]
        ]
        error, size = torch.stack(squares).sum(0).tolist() if squares else (0.0, 0.0)
        broken = not math.isfinite(error)
        return math.inf if broken else error / size if size else 0.0


def _total(pairs: list[GradientPair], side: int) -> torch.Tensor:
    total = widened_tensor(pairs[0][side]).double()
    for pair in pairs[1:]:
        total = total + widened_tensor(pair[side])
    return total


class ErrorPass(BackwardPass):
    """A backward pass that notes the error that each op's backward adds.

    Args:
        into: takes the errors.
        others: as for ``BackwardPass``.
    """

    def __init__(self, into: GradientErrors, *others: Any) -> None:
        super().__init__(*others)
        self._into = into

    def _products(
        self, entry: TapeEntry, out: list[GradientPair | None]
    ) -> Iterator[tuple[fx.Node, GradientPair]]:
        made = dict(super()._products(entry, out))
        low = [node for node in made if self._dtypes[node][0] in LOW_PRECISION_DTYPES]
        for node, exact in self._exact(entry, low, [None if pair is None else pair[1] for pair in out]):
            self._into.shares[entry.step.node, node] = finite_difference(made[node][1], exact)
        if entry.step.site is not None and short_op(entry.step.site.op) in _PIECEWISE:
            for node, exact in self._exact(entry, made, [None if pair is None else pair[0] for pair in out]):
                self._into.jumps[entry.step.node, node] = finite_difference(exact, made[node][0])
        yield from made.items()

    def _exact(
        self, entry: TapeEntry, wanted: Collection[fx.Node], gradients: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        """Return the gradients that FP32 makes of the 16-bit run's values."""
        if not wanted:
            return
        inputs = {node: (_widened(pair[1]),) * 2 for node, pair in entry.inputs.items()}
        same = TapeEntry(entry.step, inputs, True, entry.state)
        given = [None if gradient is None else widened_tensor(gradient) for gradient in gradients]
        nodes = list(wanted)
        for node, exact in zip(nodes, vjp(same, 0, Float32Backend(), nodes, given), strict=True):
            if exact is not None:
                yield node, widened_tensor(exact)


def _widened(value: Any) -> Any:
    return widened_tensor(value) if isinstance(value, torch.Tensor) else value
