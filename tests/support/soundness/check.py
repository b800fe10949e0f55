"""The check: whatever a run computes lies within its bound, unless something before it has overflowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ampaudit.bounds import BoundTable, Interval
from ampaudit.run.backends import Emulated, Native
from ampaudit.run.lockstep import LockStep, Observer, StepCall
from ampaudit.run.program import Step, compile_program
from ampaudit.trace import TracedModel
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.values import fits
from tests.support.soundness.program import torchs_own_kernels

_CPU = torch.device("cpu")
_GARBAGE = 12345.0  # what uninitialized memory shows; bfloat16 holds it, too, rounded
# a CPU's kernels for 16 bits that sum in 16 bits; bounds are for sums in float32, as on GPUs and in a scan
_SUMS_IN_16_BITS = frozenset({"adaptive_avg_pool3d", "avg_pool3d"})
_EMPTY = frozenset("empty empty_like new_empty empty_strided new_empty_strided empty_permuted".split())


def contains(interval: Interval, value: torch.Tensor) -> bool:
    """Whether a value has the known sizes of an interval, and lies within its ends and norms."""
    if not fits(value, interval.shape):
        return False
    wide = value.double()
    inside = bool(((wide >= interval.low) & (wide <= interval.high)).all())
    norms = all(bool((wide.norm(dim=a, keepdim=True) <= n).all()) for a, n in interval.norms.items())
    sums = all(bool((wide.abs().sum(a, keepdim=True) <= n).all()) for a, n in interval.sums.items())
    mean = interval.mean is None or bool((wide.mean(-1).abs() <= interval.mean).all())
    return inside and norms and sums and mean


@dataclass(frozen=True)
class Escape:
    """A value outside its bound, or one that is not finite at a proved site."""

    node: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Checked:
    """What a run is compared with.

    Attributes:
        escapes: what was found wrong.
        values: by op, how many values were looked at.
        bounded: by op, how many of them had bounds tighter than what their dtype can hold.
        failed: the steps of which one could not be run at all, and what was raised.
    """

    escapes: list[Escape] = field(default_factory=list)
    values: Counter[str] = field(default_factory=Counter)
    bounded: Counter[str] = field(default_factory=Counter)
    failed: tuple[tuple[str, ...], str] | None = None


class _Checker(Observer):
    """An observer that holds each value of the converted run against its bound as it is made.

    A proof speaks of values that no overflow has touched: 1 / inf is 0, which is in no interval of 1 / x.
    What is touched is a matter of memory, since ops write in place; so no value is freed before the end.
    """

    def __init__(self, runs: Runs, table: BoundTable, found: Checked, native: bool) -> None:
        self.sites, self.table, self.found = runs.traced.site_of_node, table, found
        self.written, self.native = runs.program.written, native
        self.touched: set[int] = set()
        self.alive: list[Any] = []
        self.given: set[str] = set()

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Look at what the step read and made."""
        before = [pair[1] for pair in call.inputs.values()]
        self.alive.append((before, value, reference))
        for node, (_, given) in call.inputs.items():
            if node.op == "placeholder" and node not in self.written and node.name not in self.given:
                self.given.add(node.name)
                self._look(node, given)
        if getattr(step.node.target, "_opname", None) in _EMPTY or _name(step.node) in _EMPTY:
            return _poisoned(value)
        reads = list(_tensors(before))
        coarse = self.native and step.low_precision and _name(step.node) in _SUMS_IN_16_BITS
        stale = coarse or any(_memory(t) in self.touched for t in reads)
        if (
            stale
            or (not step.mutates and not all(_finite(t) for t in reads))
            or not self._look(step.node, value)
        ):
            self._touch(value, call.args)
        return value

    def _touch(self, value: Any, args: Any) -> None:
        self.touched.update(map(_memory, _tensors((value, args))))

    def _look(self, node: fx.Node, value: Any) -> bool:
        """Whether the value is finite; if so, it must be inside."""
        whole = all(_finite(item) for item in _tensors(value))
        site = self.sites.get(node.name)
        if not whole:
            if site is not None and site.id in self.table.proved:
                self.found.escapes.append(
                    Escape(node.name, f"{node.format_node()} was proved and is not finite")
                )
            return False
        interval = self.table.intervals.get(node.name)
        pairs = zip(value, interval, strict=True) if isinstance(interval, list) else [(value, interval)]
        for item, bounds in pairs:
            if isinstance(item, torch.Tensor) and not item.is_complex():
                self._inside(node, item, bounds)
        return True

    def _inside(self, node: fx.Node, item: torch.Tensor, bounds: Interval | None) -> None:
        self.found.values[_name(node)] += 1
        if bounds is None or not item.numel():
            return
        if -1 not in bounds.shape and tuple(item.shape) != bounds.shape:
            return  # torch's fake kernel has another shape than the real one (nansum of no axes)
        tight = _says_something(bounds, item.dtype, node.meta.get("val"))
        if -1 in bounds.shape or not tight:  # a size that the values decide, or ends that hold for anything
            one = (1,) * item.ndim
            low, high = bounds.low.amin().reshape(one), bounds.high.amax().reshape(one)
            bounds = replace(
                bounds, shape=tuple(item.shape), low=low, high=high, norms={}, sums={}, mean=None
            )
        self.found.bounded[_name(node)] += tight
        if not contains(bounds, item):
            seen = item.double()
            ends = f"[{float(bounds.low.min()):.6g}, {float(bounds.high.max()):.6g}]"
            values = f"[{float(seen.min()):.6g}, {float(seen.max()):.6g}]"
            kind = (
                ""
                if tuple(item.shape) == bounds.shape
                else f" of shape {bounds.shape}, not {tuple(item.shape)}"
            )
            text = f"{node.format_node()}: values {values} escape the bound {ends}{kind}"
            self.found.escapes.append(Escape(node.name, text))


class Runs:
    """Runs of one converted graph, natively and as a scan emulates them; every value is checked."""

    def __init__(self, traced: TracedModel) -> None:
        self.traced, self.program = traced, compile_program(traced, _CPU)
        converted = attach_weights(traced)
        self._executors = {
            native: LockStep(self.program, converted, Native() if native else Emulated(), _CPU)
            for native in (True, False)
        }

    def checked(self, table: BoundTable, inputs: Sequence[torch.Tensor], *, native: bool) -> Checked:
        """Run once, in the graph's true dtypes or emulated."""
        found = Checked()
        observer = _Checker(self, table, found, native)
        group: tuple[Step, ...] = ()
        try:
            with torch.no_grad(), torchs_own_kernels():
                executor = self._executors[native]
                state = executor.start([tensor.clone() for tensor in inputs])
                for steps in executor.proceed(state, observer):
                    group = steps  # that is about to run
        except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
            found.failed = tuple(step.node.name for step in group), str(error).partition("\n")[0]
        return found


def check(traced: TracedModel, table: BoundTable, batches: Iterable[Sequence[torch.Tensor]]) -> None:
    """Demand that every value of every run is inside, natively and emulated."""
    runs = Runs(traced)
    for inputs in batches:
        for native in (True, False):
            found = runs.checked(table, inputs, native=native)
            assert found.failed is None, found.failed
            assert not found.escapes, "\n".join(map(str, found.escapes))


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return node.op if schema is None else schema.name.split("::")[1]


def _says_something(bounds: Interval, dtype: torch.dtype, value: Any) -> bool:
    """Whether a bound is less than all that the dtype of the graph holds, which emulation carries wider."""
    first = value[0] if isinstance(value, list | tuple) else value
    if dtype is torch.float32 and isinstance(first, torch.Tensor) and first.is_floating_point():
        dtype = first.dtype
    if not bounds.low.numel():
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return bounds.peak < 0.99 * torch.finfo(dtype).max
    return dtype is torch.bool or float(bounds.high.amax() - bounds.low.amin()) < torch.iinfo(dtype).max


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _finite(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all())


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _poisoned(value: Any) -> Any:
    """Uninitialized memory may hold anything: something large."""
    garbage = _GARBAGE if value.is_floating_point() else 99
    return torch.full_like(value, True if value.dtype is torch.bool else garbage)
