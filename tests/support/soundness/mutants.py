"""Transfers that are broken on purpose, one at a time: a test of random programs must find each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx

from ampaudit.bounds import Interval, analysis, elementwise, stored
from ampaudit.bounds.transfers import TRANSFERS, OpCall, RegisteredTransfer

Wrap = Callable[[Callable[[OpCall], Any], OpCall], Any]


@dataclass(frozen=True)
class Mutant:
    """What is wrong: transfers of some ops, or a function that several of them use.

    Attributes:
        ops: base names of the ops whose transfers are wrapped.
        wrap: from a transfer and a call to a wrong interval.
        patches: functions replaced, by module and name.
    """

    ops: tuple[str, ...] = ()
    wrap: Wrap | None = None
    patches: tuple[tuple[Any, str, Any], ...] = ()

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Break it, until the monkeypatch is undone."""
        for module, name, function in self.patches:
            monkeypatch.setattr(module, name, function)
        for op, entry in list(TRANSFERS.items()):
            if op._schema.name.split("::")[1].rstrip("_") in self.ops:
                monkeypatch.setitem(TRANSFERS, op, self._broken(entry))

    def _broken(self, entry: RegisteredTransfer) -> RegisteredTransfer:
        wrap = self.wrap
        assert wrap is not None
        return replace(entry, function=lambda call: wrap(entry.function, call))


def _given(**arguments: Any) -> Wrap:
    """The call with other arguments than it has."""

    def wrap(transfer: Callable[[OpCall], Any], call: OpCall) -> Any:
        changed = {name: value for name, value in arguments.items() if name in call.arguments}
        call.ignore(*changed)
        return transfer(replace(call, arguments={**call.arguments, **changed}))

    return wrap


def _span(change: Callable[[Interval], Interval]) -> Wrap:
    """Every interval of the result changed."""

    def wrap(transfer: Callable[[OpCall], Any], call: OpCall) -> Any:
        found = transfer(call)
        return [change(item) for item in found] if isinstance(found, list) else change(found)

    return wrap


def _scaled(low: float, high: float) -> Callable[[Interval], Interval]:
    return lambda s: replace(s, low=torch.minimum(s.low * low, s.high * high), high=s.high * high)


def _turned(interval: Interval) -> Interval:
    return replace(interval, low=-interval.high, high=-interval.low)


def _shorter(interval: Interval) -> Interval:
    return replace(interval, norms={axis: norm * 0.5 for axis, norm in interval.norms.items()})


def _other_axis(interval: Interval) -> Interval:
    """A sum along one axis, claimed for the one before it."""
    if len(interval.shape) < 2:
        return interval
    one = (1,) * len(interval.shape)
    moved = {(axis - 1) % len(one): total.amax().reshape(one) for axis, total in interval.sums.items()}
    return replace(interval, sums=moved)


def _nonnegative(interval: Interval) -> Interval:
    return replace(interval, low=interval.low.clamp(min=0.0), high=interval.high.clamp(min=0.0))


def _nonpositive(interval: Interval) -> Interval:
    return replace(interval, high=interval.low.clamp(min=0.0))


def _unfilled(transfer: Callable[[OpCall], Any], call: OpCall) -> Any:
    return replace(transfer(call), low=call.interval("self").low, high=call.interval("self").high)


def _any_value(node: fx.Node, beside: fx.Node | None = None) -> fx.Node | None:
    """The value behind a cast where it is asked for beside another; else nothing, which is itself."""
    return _ROUNDED(node, beside) if beside is not None else None


_ROUNDED = elementwise._rounded


def _positive(transfer: Callable[[OpCall], Any], call: OpCall) -> Any:
    return _given(alpha=abs(call.number("alpha") or 1.0))(transfer, call)


MUTANTS = {
    "add and sub forget alpha": Mutant(("add", "sub", "rsub"), _given(alpha=1)),
    "var and std forget correction": Mutant(("var", "std"), _given(correction=1, unbiased=True)),
    "celu and elu take alpha for positive": Mutant(("celu", "elu"), _positive),
    "the upper end of a product is halved": Mutant(("mul",), _span(_scaled(1.0, 0.5))),
    "a quotient has the wrong sign": Mutant(("div",), _span(_turned)),
    "the lower end of a sum is 0": Mutant(("sum",), _span(_nonnegative)),
    "norms are half as long as they may be": Mutant(("layer_norm", "rms_norm", "linear"), _span(_shorter)),
    "a softmax adds up along another axis": Mutant(("softmax", "_softmax"), _span(_other_axis)),
    "a linear layer has no bias": Mutant(("linear",), _given(bias=None)),
    "a convolution has no negative weights": Mutant(("conv1d", "conv2d"), _span(_nonpositive)),
    "masked_fill fills nothing": Mutant(("masked_fill",), _unfilled),
    "a maximum without keepdim is one with it": Mutant(
        patches=((elementwise, "_keeps_rows", lambda *_: True),)
    ),
    "any root is the root of this value": Mutant(patches=((elementwise, "_rounded", _any_value),)),
    "integers do not wrap around": Mutant(patches=((stored, "_as_integer", lambda x, dtype: x),)),
    "results are not rounded": Mutant(patches=((analysis, "stored", lambda x, dtype: x),)),
}  # fmt: skip
