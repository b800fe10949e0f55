"""Finds the ops at which errors of outputs enter.

An ``Attribution`` runs parts of the model in 16 bits and the rest in FP32. A site's local error says little
about an output: every op of a healthy model rounds. What matters is how much of the output's error remains
when only that op rounds. Errors of independent ops add up as squares, so a best-first search over halves of
the graph finds the largest contribution in about 2 log2(n) runs.

An op whose error only matters together with that of others does not stand out alone. Then the search looks
for the part whose removal reduces the error most.

Where a decision differs between the runs (``decisions``), it is pinned to FP32's choice. If that repairs the
output, the culprit is the op that flips the decision; where several ops would flip it, the first of them,
since later ones round the same values again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ampaudit.core.errors import RunFailed
from ampaudit.core.sites import SiteId
from ampaudit.run.backends import Emulated, Float32Backend
from ampaudit.run.device import guarded
from ampaudit.run.lockstep import CarriedState, LockStep, Observer, Pair, StepCall
from ampaudit.run.measure import fetch
from ampaudit.run.meter import DecisionDetail, differing_choices, with_fp32_choices
from ampaudit.run.outputs import OutputComparison, compare_outputs
from ampaudit.run.program import Step
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Placeholder, Role, Site, Slot
from ampaudit.trace.opnames import base_name, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES

_SUMS = frozenset({"add", "sub", "add_", "sub_", "__iadd__", "__isub__"})
MAX_OUTPUTS = 3  # outputs of a batch whose errors are traced back; most share one culprit
MAX_RUNS = 96
STANDS_OUT = 0.25  # least share of an output's error that makes an op its culprit
COMPARABLE = 0.5  # contributions of at least this share of the largest are candidates as well
MAX_DECISIONS = 8
REMAINING_SHARE = 0.25  # share of the error that may remain once its cause is removed

Items = Sequence[frozenset[int]]
Energy = Callable[[frozenset[int]], float]


@dataclass(frozen=True, slots=True)
class Culprit:
    """The place where the error of some outputs enters."""

    outputs: tuple[str, ...]  # names of the outputs, the worst first
    # one op, or all ops of one line that cause the error together; empty if it is spread out
    sites: tuple[SiteId, ...] = ()
    # name of the weight or input whose rounding causes the error, if it is not the op's result
    operand: str = ""
    # accuracy of the worst output with only these sites in 16 bits; ``None`` if exact
    alone_db: float | None = None
    # accuracy of that output with all other sites in 16 bits; ``None`` if exact
    without_db: float | None = None
    decision: SiteId | None = None  # the op that chooses differently because of the error
    detail: DecisionDetail | None = None  # the margins of these choices
    stalled: float = 0.0  # share of the additions at these sites that lose their effect in 16 bits


@dataclass(frozen=True, slots=True)
class _Run:
    outputs: Mapping[str, OutputComparison]
    flips: Mapping[str, int]


@dataclass
class Attribution:
    """Runs one batch repeatedly, each time with a different part of the model in 16 bits."""

    executor: LockStep  # executor of the whole program
    seed: int  # seed of the batch's random numbers
    carried: CarriedState  # inputs and buffers, with FP32's values in both runs
    _runs: dict[frozenset[int], _Run] = field(default_factory=dict)
    _runs_left: int = MAX_RUNS

    @cached_property
    def _units(self) -> tuple[RoundingUnit, ...]:
        return rounding_units(self.executor)

    @cached_property
    def _everything(self) -> frozenset[int]:
        return frozenset(range(len(self._units)))

    def culprits(self, outputs: Sequence[str], least: float) -> list[Culprit]:
        """Return the culprit of each output with less than ``least`` dB, grouped by culprit."""
        by_sites: dict[tuple[SiteId, ...], Culprit] = {}
        for name in outputs:
            culprit = self._culprit(name, least)
            earlier = by_sites.get(culprit.sites)
            if earlier is not None:
                explained = culprit if earlier.decision is None else earlier
                names = (*earlier.outputs, *culprit.outputs)
                culprit = replace(
                    earlier, outputs=names, decision=explained.decision, detail=explained.detail
                )
            by_sites[culprit.sites] = culprit
        return list(by_sites.values())

    def _culprit(self, name: str, least: float) -> Culprit:
        whole = self._run(self._everything)
        total, accuracy = whole.outputs[name].energy, whole.outputs[name].accuracy_db
        if (
            accuracy is None
            or accuracy >= least
            or self._run(frozenset()).outputs[name].energy > REMAINING_SHARE * total
        ):
            return Culprit((name,))
        decision = self._decision(name, total, whole)

        def energy(units: frozenset[int]) -> float:
            run = self._run(units)
            return run.outputs[name].energy if decision is None else float(run.flips.get(decision, 0))

        selection = self._search(energy, first=decision is not None)
        return self._describe(name, selection, decision) if selection else Culprit((name,))

    def _describe(self, name: str, selection: frozenset[int], decision: str | None) -> Culprit:
        sites = tuple(dict.fromkeys(self._units[index].site.id for index in sorted(selection)))
        probe = Probe(
            detail=DecisionDetail(decision) if decision is not None else None,
            additions=frozenset(node.name for i in selection for node in self._units[i].nodes),
        )
        self._execute(self._everything, probe)
        alone, rest = (
            self._run(selection).outputs[name],
            self._run(self._everything - selection).outputs[name],
        )
        deciding = {s.node: s.id for s in self.executor.program.traced.sites}
        nodes = {node for index in selection for node in self._units[index].nodes}
        return Culprit(
            (name,),
            sites,
            self._rounded_source(name, selection),
            alone.accuracy_db,
            rest.accuracy_db,
            deciding.get(decision) if decision is not None else None,
            probe.detail,
            probe.stalled if _is_running_sum(nodes) else 0.0,
        )

    def _search(self, energy: Energy, *, first: bool) -> frozenset[int]:
        """Return one unit, or all units of one line; an empty set if none stands out.

        Among comparable candidates, return the largest, or with ``first`` the first in the graph.
        """
        singles = [frozenset((index,)) for index in sorted(self._everything)]
        total = energy(self._everything)

        def removed_energy(units: frozenset[int]) -> float:
            return max(total - energy(self._everything - units), 0.0)

        for items, size, share in (
            (singles, energy, STANDS_OUT),
            (singles, removed_energy, 1 - REMAINING_SHARE),
            (self._lines(), energy, STANDS_OUT),
        ):
            candidates = self._strongest(items, size, share * total)
            if candidates:
                return min(candidates, key=min) if first else candidates[0]
        return frozenset()

    def _strongest(self, items: Items, size: Energy, least: float) -> list[frozenset[int]]:
        """Return the items whose contributions are comparable with the largest, that one first."""
        counter = itertools.count()
        heap = [(-math.inf, next(counter), items)]
        strongest: list[tuple[float, frozenset[int]]] = []
        while heap and self._runs_left > 0:
            negative, _, part = heapq.heappop(heap)
            if -negative < least or (strongest and -negative < COMPARABLE * strongest[0][0]):
                break
            if len(part) == 1:
                strongest.append((-negative, part[0]))
                continue
            middle = len(part) // 2
            for half in (part[:middle], part[middle:]):
                heapq.heappush(heap, (-size(frozenset().union(*half)), next(counter), half))
        return [item for _, item in strongest]

    def _lines(self) -> list[frozenset[int]]:
        """Group the units of one op on one line of code, as in a loop or a stack of layers."""
        groups: dict[tuple[object, ...], set[int]] = {}
        for index, unit in enumerate(self._units):
            site = unit.site
            line = (site.source.file, site.source.line) if site.source is not None else (site.layer_type,)
            groups.setdefault((*line, site.op), set()).add(index)
        return [frozenset(group) for group in groups.values()]

    def _rounded_source(self, name: str, selection: frozenset[int]) -> str:
        """Return the weight or input whose rounding accounts for most of a single unit's contribution."""
        if len(selection) != 1:
            return ""
        total = self._run(selection).outputs[name].energy
        for node, source in self._units[min(selection)].sources:
            alone = self._execute(frozenset(), Probe(), extra=frozenset((node,))).outputs[name].energy
            if alone > COMPARABLE * total or (math.isinf(total) and math.isinf(alone)):
                return source
        return ""

    def _decision(self, name: str, total: float, whole: _Run) -> str | None:
        """Return the decision that repairs the output when pinned to FP32's choice, if any."""
        flipped = [step.node for step in self.executor.program.steps if whole.flips.get(step.node.name)]

        def pinned_energy(*pins: fx.Node) -> float:
            probe = Probe(pins=frozenset(node.name for node in pins))
            return self._execute(self._everything, probe).outputs[name].energy

        if not flipped or pinned_energy(*flipped) > REMAINING_SHARE * total:
            return None
        trials: list[tuple[float, str]] = []
        for node in flipped[:MAX_DECISIONS]:  # the first that repairs it: it may cause later ones to flip
            trials.append((pinned_energy(node), node.name))
            if trials[-1][0] <= REMAINING_SHARE * total:
                break
        return min(trials)[1]

    def _run(self, units: frozenset[int]) -> _Run:
        if units not in self._runs:
            self._runs[units] = self._execute(units, Probe())
        return self._runs[units]

    def _execute(self, units: frozenset[int], probe: Probe, extra: frozenset[fx.Node] = frozenset()) -> _Run:
        self._runs_left -= 1
        rounding = extra.union(*(self._units[index].nodes for index in units))
        partial = PartialLockStep(self.executor, rounding)
        try:
            with guarded(self.executor.device):
                torch.manual_seed(self.seed)
                pairs = partial.run(list(self.carried.inputs), probe, self.carried)
        except RunFailed:  # an index out of range: there are no outputs
            missing = OutputComparison("float", mismatch="no output")
            return _Run(dict.fromkeys(self.executor.program.traced.outputs, missing), {})
        outputs = dict(zip(self.executor.program.traced.outputs, pairs, strict=True))
        return _Run(compare_outputs(outputs, 0), probe.flips())


def _is_running_sum(nodes: Collection[fx.Node]) -> bool:
    """Return whether the units form a running sum: a chain of adds, or one op along an axis."""
    if any(str(node.target).startswith("aten.cumsum") for node in nodes):
        return True
    return sum(any(source in nodes for source in node.all_input_nodes) for node in nodes) * 2 >= len(nodes)


class _PartialBackend(Emulated):
    """A backend that emulates 16 bits at some nodes and computes FP32 at all others."""

    def __init__(self, inner: Emulated, rounding: Collection[fx.Node]) -> None:
        self.name = inner.name
        self._inner = inner
        self._exact = Float32Backend()
        self._rounding = rounding

    def rounds(self, step: Step) -> bool:
        if step.target is torch.ops.aten.view.dtype:  # needs the bits of the format, not of a carrier
            return True
        return step.rounds and step.node in self._rounding

    def represent(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return self._inner.represent(tensor, dtype)

    def arguments(self, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._inner if self.rounds(step) else self._exact).arguments(step)

    def call(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.rounds(step):
            return self._inner.call(step, args, kwargs)
        return self._exact.call(step, args, kwargs)


class PartialLockStep(LockStep):
    """Runs the program of another executor, rounding only some steps and placeholders to 16 bits."""

    def __init__(self, whole: LockStep, rounding: Collection[fx.Node]) -> None:
        inner = whole.backend if isinstance(whole.backend, Emulated) else Emulated()
        self._rounding = rounding
        super().__init__(whole.program, whole.placed, _PartialBackend(inner, rounding), whole.device)

    def _input(self, node: fx.Node, tensor: torch.Tensor, place: Placeholder) -> Pair:
        return self._maybe_exact(node, super()._input(node, tensor, place))

    def _weight(self, node: fx.Node, place: Placeholder) -> Pair:
        return self._maybe_exact(node, super()._weight(node, place))

    def _maybe_exact(self, node: fx.Node, pair: Pair) -> Pair:
        if node in self._rounding or pair[0] is pair[1]:
            return pair
        return pair[0], pair[0].clone() if node in self.program.written else pair[0]


@dataclass(slots=True)
class Probe(Observer):
    """Counts flipped decisions, and measures what is requested."""

    pins: frozenset[str] = frozenset()  # nodes of decisions that follow FP32's choices
    detail: DecisionDetail | None = None  # a decision to measure in detail
    additions: frozenset[str] = frozenset()  # nodes at which to count additions that have no effect
    _flips: dict[str, torch.Tensor] = field(default_factory=dict)
    _before: dict[str, torch.Tensor] = field(default_factory=dict)
    _changing: int = 0
    _stalled: int = 0

    @property
    def stalled(self) -> float:
        """The share of additions that change the sum in FP32 but not in 16 bits."""
        return self._stalled / self._changing if self._changing else 0.0

    def flips(self) -> dict[str, int]:
        """Return the number of differing choices by node."""
        return dict(zip(self._flips, map(int, fetch(self._flips.values())), strict=True))

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Count, pin or inspect decisions and sums."""
        name = step.node.name
        if step.decides and not call.computed_once:
            counted = differing_choices(reference, value)
            if counted is not None:
                self._flips[name] = counted[0]
            if self.detail is not None and name == self.detail.node:
                self.detail.inspect(step, reference, value, call)
            if name in self.pins:
                return with_fp32_choices(step, reference, value, call)
        if self.additions:
            self._inspect_sum(step, value, call)
        return value

    def _inspect_sum(self, step: Step, value: Any, call: StepCall) -> None:
        """Compare a sum with its first term, of which a copy was kept in case it is overwritten."""
        if not isinstance(value, torch.Tensor):
            return
        if any(user.name in self.additions for user in step.node.users):
            self._before[step.node.name] = value.clone()
        if step.node.name not in self.additions or not step.node.all_input_nodes:
            return
        target = overload_of(step.target)
        if target is None:
            return
        name = base_name(target)
        if name == "cumsum":
            axis = named_arguments(target, call.args, call.kwargs)["dim"]
            added = call.ref_args[0].narrow(axis, 1, max(value.shape[axis] - 1, 0))
            self._count(added != 0, value.diff(dim=axis) == 0)
        elif name in _SUMS:
            first, second = call.ref_args[0], call.ref_args[1]
            before = self._before.get(step.node.all_input_nodes[0].name, call.args[0])
            if isinstance(first, torch.Tensor) and isinstance(before, torch.Tensor):
                changing = torch.as_tensor(second, device=value.device) != 0
                if before.shape == value.shape:
                    self._count(changing.expand(value.shape), value == before)

    def _count(self, changing: torch.Tensor, same: torch.Tensor) -> None:
        self._changing += int(changing.sum())
        self._stalled += int((changing & same).sum())


@dataclass(frozen=True, slots=True)
class RoundingUnit:
    """Nodes that a rule would keep in float32 together."""

    site: Site  # the op that reports name for the unit
    nodes: frozenset[fx.Node]  # nodes whose values are rounded
    sources: tuple[tuple[fx.Node, str], ...] = ()  # inputs and weights among them, with their names


def rounding_units(executor: LockStep) -> tuple[RoundingUnit, ...]:
    """Return the rounding units of a program in graph order.

    A weight belongs to the first op that reads it, and an inserted cast to its only reader. Inputs, and casts
    that several ops read, are units of their own; reports name their first reader.
    """
    program = executor.program
    steps = {step.node: step for step in program.steps}
    places = {place.node: place for place in program.traced.placeholders}
    weights = {name: place.name for name, place in places.items()}
    weights |= {site.node: site.weight for site in program.traced.sites if site.weight is not None}
    inputs = {name for name, place in places.items() if place.slot is Slot.INPUT}
    rounding = [
        node
        for node in program.inputs
        if places[node.name].dtype in LOW_PRECISION_DTYPES
        and (node.name in inputs or node.name in executor.converted.copies)
    ]
    rounding += [step.node for step in program.steps if step.rounds and step.makes_values]
    nodes: dict[fx.Node, list[fx.Node]] = {}
    for node in rounding:
        step = steps.get(node)
        role = step.site.role if step is not None and step.site is not None else None
        if step is not None and role in (Role.COMPUTE, Role.CAST):
            nodes.setdefault(node, []).append(node)
            continue
        readers = list(_readers(node, steps))
        shared = role is not Role.WEIGHT_CAST and (node.name not in weights or node.name in inputs)
        owner = node if not readers or (shared and len(readers) > 1) else readers[0].node
        nodes.setdefault(owner, []).append(node)
    order = {node: index for index, node in enumerate(program.traced.graph.nodes)}
    units = []
    for owner, members in nodes.items():
        site = _reported_site(owner, steps)
        if site is not None:
            sources = tuple((n, weights[n.name]) for n in members if n.name in weights)
            units.append((order[owner], RoundingUnit(site, frozenset(members), sources)))
    return tuple(unit for _, unit in sorted(units, key=lambda pair: pair[0]))


def _readers(node: fx.Node, steps: dict[fx.Node, Step]) -> Iterator[Step]:
    """Return the ops that read a value, looking through views, selections and inserted casts."""
    for user in node.users:
        step = steps.get(user)
        if step is not None and step.site is not None and step.site.role in (Role.COMPUTE, Role.CAST):
            yield step
        elif step is not None:
            yield from _readers(user, steps)


def _reported_site(node: fx.Node, steps: dict[fx.Node, Step]) -> Site | None:
    step = steps.get(node)
    if step is not None and step.site is not None and step.site.role is not Role.INSERTED_CAST:
        return step.site
    reader = next(_readers(node, steps), None)
    return reader.site if reader is not None else (step.site if step is not None else None)
