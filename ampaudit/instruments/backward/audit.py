"""Audits the gradients of a run, and repeats the backward pass with repairs if something broke."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ampaudit.core.errors import ReferenceBroken, RunFailed
from ampaudit.core.sites import SiteId
from ampaudit.core.text import plural
from ampaudit.findings.finding import Gap, GapKind
from ampaudit.instruments.backward import INSTRUMENT
from ampaudit.instruments.backward.passes import (
    BackwardPass,
    CustomBackwards,
    FaultSource,
    GradientObserver,
    GradientPair,
)
from ampaudit.instruments.backward.record import (
    GradientOrigin,
    GradientRecord,
    GradientStats,
    UntracedBackward,
)
from ampaudit.instruments.backward.vjp import Tape, needs_gradient
from ampaudit.run.backends import Backend, choose_backend
from ampaudit.run.config import Recorder, RunConfig
from ampaudit.run.lockstep import LockStep, Observer
from ampaudit.run.measure import (
    BLOCK,
    FIELDS,
    as_complex,
    fetch,
    flat_pair,
    measure_cpu,
    measure_on_device,
    wrong_elements,
)
from ampaudit.run.program import Program, Step
from ampaudit.run.record import RunRecord
from ampaudit.trace.flatten import FUNCTION_OUTPUTS, TENSOR_HOOK, is_mark, mark_number, marked_values
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Placeholder, Role, Site, Slot
from ampaudit.trace.opnames import base_name, converts, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES, components

EXPONENT_OFFSET = 127
# Maximum number of roundings of 2^-24 per term of a sum of float32 gradients. Where the sum cancels, as for a
# bias before batch norm or of a key before softmax, the remainder was up to 6 per term in the models of the
# tests; meaningful sums were 2^19 and more.
ROUNDINGS = 32
_BINS = 256
_TRANSPARENT_ROLES = (Role.VIEW, Role.SELECT)
Name = tuple[str, bool]  # of a gradient: its site or parameter, and whether it is a parameter's


class GradientAudit(Recorder):
    """Audits the gradients of a loss, which is the last output of the model."""

    def __init__(self, config: RunConfig) -> None:
        scale = config.loss_scale
        assert scale is not None, "only runs with a loss have gradients"
        self.record = GradientRecord(scale.value, scale.dynamic, scale.source, scale.least)
        self._backend: Backend = config.backend or choose_backend(config.device)
        self._limit = config.number_format.max
        self._needed: dict[int, frozenset[fx.Node]] = {}
        self._device = config.device
        self._custom: dict[int, CustomBackwards] = {}
        self._tape: Tape | None = None

    def take(self, record: RunRecord) -> None:
        """Move the results since the last call into the record of a batch."""
        gaps = (u for u in self.record.untraced if not u.instead)
        record.gaps |= {Gap(gap.site, GapKind.BACKWARD, gap.name, gap.reason) for gap in gaps}
        record.parts[INSTRUMENT.name], self.record = self.record, self.record.empty_copy()

    def following(self, observer: Observer, program: Program) -> Observer:
        """Wrap the observer in a tape."""
        if id(program) not in self._needed:
            self._needed[id(program)] = needs_gradient(program)
        self._tape = Tape(observer, self._needed[id(program)])
        return self._tape

    def finish(
        self, executor: LockStep, outputs: list[Any], unrepaired: list[Any], number: int, title: str
    ) -> None:
        """Run the backward pass from the loss, which is the last output."""
        assert self._tape is not None, "a run is recorded before its backward pass"
        tape, program = self._tape, executor.program
        self._tape = None
        reference, value = outputs[-1]
        self._note_parameters(program)
        self.record.losses.append((float(reference), float(unrepaired[-1][1]), float(value)))
        loss = program.outputs[-1]
        if loss not in tape.needed:
            raise RunFailed(
                "no parameter gets a gradient: the loss depends on none that requires one",
                hint="check requires_grad of the parameters, and detach() or no_grad() before the loss",
            )
        if id(program) not in self._custom:
            self._custom[id(program)] = CustomBackwards(program, self._backend, self._device)
        customs = self._custom[id(program)]
        dtypes, seeds = gradient_dtypes(program), self.seeds(program, reference)
        backward = BackwardPass(tape, dtypes, self._backend, customs)
        names = GradientNames(program.traced.site_of_node, program.traced.placeholders)

        def represent(gradient: torch.Tensor, node: fx.Node) -> torch.Tensor:
            return self._backend.represent(gradient, dtypes[node][0])

        meter = GradientMeter(self.record.scale)
        backward.run(seeds, MeasuringObserver(meter, names))
        meter.finish()
        if meter.broken:
            repaired = GradientMeter(self.record.scale)
            measuring = MeasuringObserver(repaired, names)
            repairing = RepairingObserver(measuring, names, represent, self._limit, number)
            backward.run(seeds, repairing)
            repaired.finish()
            known = {(origin.site, origin.value) for origin in self.record.origins}
            self.record.origins += [o for o in repairing.origins if (o.site, o.value) not in known]
            meter = repaired
        if broken := meter.broken_reference:
            raise ReferenceBroken(
                f"the FP32 gradient itself is NaN or infinite in {title}: of {broken[0]}"
                + (f" and {plural(len(broken) - 1, 'other parameter')}" if len(broken) > 1 else "")
            )
        meter.into(self.record)
        for site in meter.unpaired:
            note = f"{site}: its gradient is not audited; its size depends on values and differs in 16 bits"
            if note not in self.record.notes:
                self.record.notes.append(note)
        self._note_untraced(customs, names, tape)

    def seeds(self, program: Program, loss: torch.Tensor) -> dict[fx.Node, GradientPair]:
        """Return the gradient of the loss, which is its scale, in both runs."""
        node, scale = program.outputs[-1], self.record.scale
        dtype = gradient_dtypes(program)[node][0]
        low = self._backend.represent(torch.full_like(loss, scale), dtype)
        return {node: (torch.full_like(loss, scale), low)}

    def _note_parameters(self, program: Program) -> None:
        places = [p for p in program.traced.placeholders if p.slot is Slot.PARAMETER]
        frozen = {p.name for p in places if not program.traced.tensors[p.node].requires_grad}
        self.record.notes += [n for n in program.traced.backward_notes if n not in self.record.notes]
        self.record.frozen = tuple(sorted(frozen | set(self.record.frozen)))
        first: dict[int, str] = {}
        for place in places:
            same = first.setdefault(id(program.traced.tensors[place.node]), place.name)
            if place.name not in frozen:
                self.record.trainable.setdefault(place.name, same)

    def _note_untraced(self, customs: CustomBackwards, names: GradientNames, tape: Tape) -> None:
        known = {(backward.site, backward.name) for backward in self.record.untraced}
        for entry in tape.marks:
            mark, number = entry.step.node, mark_number(entry.step.node)
            if entry.step.target not in (FUNCTION_OUTPUTS, TENSOR_HOOK) or number not in customs.untraced:
                continue
            custom, (reason, instead) = customs.backwards[number], customs.untraced[number]
            site = names.op_site(mark)
            if not instead:
                self.record.behind |= names.parameters_behind(marked_values(mark))
            if (site, custom.name) not in known:
                self.record.untraced.append(
                    UntracedBackward(site, custom.name, reason, custom.source, instead)
                )


def gradient_dtypes(program: Program) -> dict[fx.Node, tuple[torch.dtype | None, ...]]:
    """Return the dtypes of each node's values, and so of its gradients, in the converted model."""
    places = {p.node: p.dtype for p in program.traced.placeholders}
    dtypes: dict[fx.Node, tuple[torch.dtype | None, ...]] = {n: (places[n.name],) for n in program.inputs}
    dtypes.update({step.node: step.dtypes for step in program.steps})
    return dtypes


class GradientNames:
    """Maps nodes to the names of their gradients in the record: a site or a parameter."""

    def __init__(self, sites: dict[str, Site], placeholders: Sequence[Placeholder]) -> None:
        self.sites = sites  # sites by name of their node
        self._parameters = {place.node: place.name for place in placeholders}

    def of(self, node: fx.Node) -> Name | None:
        """Return the name of a node's gradient; ``None`` for ops that do not compute values."""
        if node.name in self._parameters:
            return self._parameters[node.name], True
        site = self.sites.get(node.name)
        return None if site is None or site.role in _TRANSPARENT_ROLES else (site.id, False)

    def parameters_behind(self, nodes: Sequence[fx.Node]) -> set[str]:
        """Return the parameters on which values depend."""
        waiting, visited = list(nodes), set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node not in visited:
                visited.add(node)
                waiting += node.all_input_nodes
        return {self._parameters[node.name] for node in visited if node.name in self._parameters}

    def op_site(self, node: fx.Node) -> SiteId:
        """Return the site of an op or of a custom function's output, or else of its source."""
        site = self.sites.get(marked_values(node)[0].name if is_mark(node.target) else node.name)
        return self.source_site(node) if site is None else site.id

    def source_site(self, node: fx.Node) -> SiteId:
        """Return the site that computed the values, or the first one that uses a parameter."""
        name, is_parameter = self.name_or_source(node)
        if not is_parameter:
            return SiteId(name)
        while node.name not in self._parameters:
            node = node.all_input_nodes[0]
        users = (self.sites.get(user.name) for user in node.users)
        return next((site.id for site in users if site is not None), SiteId(name))

    def name_or_source(self, node: fx.Node) -> Name:
        """Return the name of a node or, for ops that do not compute values, of their source."""
        while (name := self.of(node)) is None:
            site, sources = self.sites.get(node.name), node.all_input_nodes
            if not sources:
                return (site.id if site else node.name), False
            node = sources[0]
        return name


class MeasuringObserver(GradientObserver):
    """Measures every complete gradient without changing any."""

    def __init__(self, meter: GradientMeter, names: GradientNames) -> None:
        self.meter = meter
        self._names = names

    def observe_share(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Record the source of a gradient that is a sum, which may cancel to rounding errors."""
        name = self._names.of(of) if is_mark(step.target) or _adds(step.node, of) else None
        source = self._names.of(marked_values(step.node)[0] if is_mark(step.target) else step.node)
        if name is not None and source is not None:
            self.meter.sums(name, source[0])
        return pair[1]

    def observe_total(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Measure the gradient."""
        name = self._names.of(node)
        if name is not None:
            site = self._names.sites.get(node.name)
            keep = site is not None and site.role is Role.WEIGHT_CAST
            self.meter.add(name, *pair, low_precision=dtype in LOW_PRECISION_DTYPES, keep=keep)
        return pair[1]


@dataclass
class RepairingObserver(GradientObserver):
    """Measures, repairs each wrong element, and records its origin.

    A wrong element is replaced by FP32's value, clamped to the format and rounded. Every gradient computed
    from a repaired one is replaced whole in the same way, so that later gradients are audited as if the fault
    had not happened. The op that computed a wrong share is the origin, unless its own gradient has exceeded
    the format since a repair.
    """

    inner: MeasuringObserver  # observer of the repaired gradients
    names: GradientNames  # names of gradients in the record
    # function that represents a gradient of a node in the 16-bit run
    represent: Callable[[torch.Tensor, fx.Node], torch.Tensor]
    limit: float  # largest number of the format
    batch: int  # number of the batch
    origins: list[GradientOrigin] = field(default_factory=list)  # origins in the order of the backward pass
    _beyond: set[fx.Node] = field(default_factory=set)
    _followed: set[fx.Node] = field(default_factory=set)
    _counted: dict[fx.Node, torch.Tensor] = field(default_factory=dict)  # elements that broke in some share

    def observe_share(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Repair one op's share."""
        self.inner.observe_share(step, of, pair)
        if pair[0].shape != pair[1].shape:
            return pair[1]
        # the nodes whose gradients the op received
        sources = marked_values(step.node) if is_mark(step.target) else [step.node]
        behind = not self._beyond.isdisjoint(sources)
        wrong = _wrong(pair)
        if wrong is not None:
            self._repair(of, pair, wrong)
            if not behind:
                self._note(step.node, of, fault)
        elif behind and bool(components(pair[0]).abs().nan_to_num().amax() > self.limit):
            self._beyond.add(of)
        if wrong is None and self._followed.isdisjoint(sources):
            return pair[1]
        self._followed.add(of)
        return self._following(of, pair)

    def observe_sum(self, node: fx.Node, pair: GradientPair) -> torch.Tensor:
        """Repair a sum: that of finite shares may be infinite, as may the scaled loss itself."""
        wrong = _wrong(pair)
        if wrong is not None:
            if node not in self._beyond:
                self._note(node, node)
            self._repair(node, pair, wrong)
            self._followed.add(node)
        # repaired shares are clamped: two of opposite sign would add up to zero
        followed = node in self._followed and pair[0].shape == pair[1].shape
        return self._following(node, pair) if followed else pair[1]

    def observe_total(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Measure the gradient after repairs."""
        self._counted.pop(node, None)
        return self.inner.observe_total(node, dtype, pair)

    def _note(self, node: fx.Node, of: fx.Node, fault: FaultSource | None = None) -> None:
        value, is_parameter = self.names.name_or_source(of)
        where = (fault.name, fault.op, fault.source) if fault is not None else ()
        site = self.names.source_site(node) if fault is None else self.names.op_site(node)
        self.origins.append(GradientOrigin(site, value, is_parameter, self.batch, *where))

    def _repair(self, of: fx.Node, pair: GradientPair, wrong: torch.Tensor) -> None:
        self._beyond.add(of)
        if (counted := self._counted.get(of)) is None:
            self._counted[of] = wrong
        else:  # an element of two shares that break, or of their sum, is one
            self._counted[of], wrong = counted | wrong, wrong & ~counted
        bad = int(wrong.sum())
        nan = int((pair[1].isnan() & wrong).sum())
        self.inner.meter.wrong(self.names.name_or_source(of), infinite=bad - nan, nan=nan)

    def _following(self, of: fx.Node, pair: GradientPair) -> torch.Tensor:
        clamped = components(pair[0]).clamp(-self.limit, self.limit)
        whole = as_complex(clamped) if pair[0].is_complex() else clamped
        return self.represent(whole, of).to(pair[1].dtype)


def _wrong(pair: GradientPair) -> torch.Tensor | None:
    """Return the wrong elements, if any; one component of a complex number is enough."""
    wrong = wrong_elements(*map(components, pair))
    return wrong.any(-1) if wrong is not None and pair[0].is_complex() else wrong


def _adds(node: fx.Node, term: fx.Node) -> bool:
    """Return whether an op adds a value unscaled, so that its gradient is a sum of the result's."""
    op = overload_of(node.target)
    if op is None:
        return False
    arguments = named_arguments(op, node.args, dict(node.kwargs))
    if converts(op) or base_name(op) in ("add", "add_", "sub", "sub_"):
        return "alpha" not in arguments
    return arguments.get("bias") is term or (base_name(op) == "addmm" and arguments["self"] is term)


def exponent_counts(magnitudes: torch.Tensor) -> torch.Tensor:
    """Count the elements x of a float32 vector with 2^e < |x| <= 2^(e+1) at index e + 127; shape (256,).

    The bins are open below and closed above, so that "x rounds to zero", x <= 2^k, applies to whole bins.
    Zeros are left out; bin 255 counts inf and NaN. All subnormal numbers of float32 have the smallest
    exponent, -127.
    """
    bits = magnitudes.view(torch.int32) & 0x7FFFFFFF
    places = torch.where(bits == 0, _BINS, ((bits - 1) >> 23).clamp_(min=0))
    places = torch.where(bits > 0x7F7FFFFF, _BINS - 1, places)
    counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=magnitudes.device)
    return counts.scatter_add_(0, places.long(), torch.ones_like(places, dtype=torch.int64))[:_BINS]


def counts_on_cpu(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``exponent_counts`` of a finite reference, and how many are zero in ``value``; shape (257,).

    Takes a fraction of the time by working block by block, in scratch memory that stays in the cache.
    """
    total = torch.zeros(_BINS + 1, dtype=torch.int64)
    scratch = torch.empty(min(BLOCK, reference.numel()), dtype=torch.int32)
    both = torch.empty(scratch.shape, dtype=torch.bool)
    bits = reference.view(torch.int32)
    for start in range(0, reference.numel(), BLOCK):
        part = bits[start : start + BLOCK]
        places = torch.bitwise_and(part, 0x7FFFFFFF, out=scratch[: part.numel()])
        places.sub_(1).bitwise_right_shift_(23).add_(1)  # one more than the bin, so that zeros are at 0
        counts = torch.bincount(places, minlength=_BINS)
        total[: _BINS - 1] += counts[1:_BINS]
        if value is not reference:
            pair = reference[start : start + BLOCK], value[start : start + BLOCK]
            nonzero = torch.logical_and(*pair, out=both[: part.numel()])
            total[_BINS] += part.numel() - counts[0] - torch.count_nonzero(nonzero)
    return total


_Measured = tuple[list[float] | torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Row:
    name: Name
    low_precision: bool
    fields: list[float] | torch.Tensor
    counts: torch.Tensor
    elements: int


class GradientMeter:
    """Measures pairs of gradients. On a GPU, measurements stay on the device until ``finish``.

    Exponents are counted without the loss scale.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        mantissa, exponent = math.frexp(scale)
        # bins of the scaled gradient are those of the unscaled one if the scale is a power of two
        self._exponent = exponent - 1 if mantissa == 0.5 else None
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, _Measured]] = {}
        self._rows: list[_Row] = []
        self._sums: list[tuple[Name, str]] = []
        self._cancelled: set[Name] = set()
        self._wrong: dict[Name, tuple[int, int]] = {}
        self._fetched: list[tuple[_Row, dict[str, float], list[int]]] = []
        # sites whose gradients differ in size between FP32 and 16 bits, in order
        self.unpaired: dict[str, None] = {}

    def add(
        self, name: Name, reference: torch.Tensor, value: torch.Tensor, *, low_precision: bool, keep: bool
    ) -> None:
        """Measure one gradient; with ``keep``, its results are reused for the parameter behind a cast."""
        if reference.shape != value.shape:
            self.unpaired[name[0]] = None
            return
        if value.numel() == 0:
            return
        if value.dtype != reference.dtype:
            value = value.to(reference.dtype)
        reference, value = components(reference), components(value)
        earlier = self._known.get(id(value))
        if earlier is None or earlier[0] is not reference:
            measured = self._measured(*flat_pair(reference, value))
        else:
            measured = earlier[2]
        if keep:
            self._known[id(value)] = reference, value, measured
        self._rows.append(_Row(name, low_precision, *measured, value.numel()))

    def _measured(self, first: torch.Tensor, second: torch.Tensor) -> _Measured:
        on_cpu = first.device.type == "cpu"
        fields = measure_cpu(first, second) if on_cpu else measure_on_device(first, second)
        if self._exponent is None:
            first, second = first / self._scale, second / self._scale
        if isinstance(fields, list) and first.dtype is torch.float32 and not fields[FIELDS.index("ref_bad")]:
            return fields, counts_on_cpu(first, second)
        flushed = ((second == 0) & (first != 0)).sum()
        return fields, torch.cat([exponent_counts(first.float()), flushed.reshape(1)])

    def sums(self, name: Name, source: str) -> None:
        """Record that a gradient is the sum of a site's gradient, perhaps over rows."""
        self._sums.append((name, source))

    def wrong(self, name: Name, *, infinite: int, nan: int) -> None:
        """Count elements that are repaired before they are measured."""
        before = self._wrong.get(name, (0, 0))
        self._wrong[name] = before[0] + infinite, before[1] + nan

    def finish(self) -> None:
        """Fetch everything from the device at once."""
        waiting = iter(fetch(row.fields for row in self._rows if isinstance(row.fields, torch.Tensor)))
        counts = fetch(row.counts for row in self._rows)
        for row, numbers in zip(self._rows, counts, strict=True):
            fields = next(waiting) if isinstance(row.fields, torch.Tensor) else row.fields
            self._fetched.append((row, dict(zip(FIELDS, fields, strict=True)), numbers))
        self._rows.clear()
        self._known.clear()
        self._find_cancelled()

    def _find_cancelled(self) -> None:
        """Find gradients that are sums and in FP32 no larger than the rounding errors of their terms."""
        by_name = {row.name: (row.elements, fields) for row, fields, _ in self._fetched}
        noise: dict[Name, float] = {}
        for name, source in self._sums:
            source_name = (source, False)
            if source_name not in by_name or name not in by_name:
                continue
            (elements, terms), (length, fields) = by_name[source_name], by_name[name]
            rows, rms = elements / length, math.sqrt(terms["ref_sq"] / elements)
            least = rows * max(ROUNDINGS * 2.0**-24 * rms, noise.get(source_name, 0.0))
            noise[name] = max(noise.get(name, 0.0), least)
            if fields["ref_peak"] <= noise[name]:
                self._cancelled.add(name)

    @property
    def broken(self) -> bool:
        """Whether a gradient is inf or NaN in 16 bits only."""
        return any(f["pos_inf"] + f["neg_inf"] + f["nan"] > 0 for _, f, _ in self._fetched)

    @property
    def broken_reference(self) -> list[str]:
        """The parameters whose FP32 gradient is inf or NaN."""
        rows = ((row.name, fields) for row, fields, _ in self._fetched)
        return [name for (name, is_parameter), fields in rows if is_parameter and fields["ref_bad"] > 0]

    def into(self, record: GradientRecord) -> None:
        """Merge the measurements into a record."""
        for row, fields, counts in self._fetched:
            name, is_parameter = row.name
            table: dict[Any, GradientStats] = record.parameters if is_parameter else record.sites
            stats = table.setdefault(name, GradientStats(row.low_precision))
            stats.values.merge(fields, row.elements)
            *bins, flushed = counts
            stats.flushed += flushed
            stats.nonzero += sum(bins[: _BINS - 1])
            stats.exponents += Counter(
                {place - EXPONENT_OFFSET - (self._exponent or 0): n for place, n in enumerate(bins[:-1]) if n}
            )
            if math.isfinite(fields["ref_peak"]):
                stats.peak = max(stats.peak, fields["ref_peak"] / self._scale)
            infinite, nan = self._wrong.pop(row.name, (0, 0))
            stats.values.pos_inf += infinite
            stats.values.nan += nan
            stats.cancelled |= row.name in self._cancelled
