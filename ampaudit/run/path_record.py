"""Records what the model's code reads along a path, and whether it decides the same way in 16 bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch

from ampaudit.core.errors import RunFailed
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.run.guards import guarded
from ampaudit.run.lockstep import Carried, LockStep, shape_of
from ampaudit.run.meter import PathValues
from ampaudit.run.observer import Observer, StepCall
from ampaudit.run.step import Step
from ampaudit.trace.flatten import VALUE_READ, mark_number, marked_values
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.path.reads import ReadKind, ValueRead, python_value
from ampaudit.trace.replay import META_KEY
from ampaudit.trace.values import inexact

__all__ = ["PathRecord", "ReadStats", "takes_path"]


@dataclass(slots=True)
class ReadStats:
    """The reads of values by one line of the model's code, over all batches.

    Attributes:
        name: how the code reads them (``bool``, ``item``, ``numpy`` ...), or the op whose size they decide.
        kind: what Python makes of them.
        layer: path of the module whose forward reads them.
        source: the innermost line of the model's code.
        caller: the user's own line, if that is another one.
        sizes: whether an op's sizes depend on values, rather than Python code.
        producer: the op that computed the values.
        reads: how often they were read.
        differing: how often Python goes another way with the values of the 16-bit run.
        faults: how often it would not, were it not for a value that overflows before.
        batch: number of the first batch in which it does.
        fp32: what was read in FP32 the first time that it differs, as text; otherwise the first time.
        low: the same in 16 bits.
        answers: how often each value was read in FP32.
        error_sq: of arrays of floats, the sum of squared differences.
        signal_sq: of the same, the sum of squares in FP32.
    """

    name: str
    kind: ReadKind
    layer: str
    source: SourceLine | None
    caller: SourceLine | None
    sizes: bool = False
    producer: SiteId | None = None
    reads: int = 0
    differing: int = 0
    faults: int = 0
    batch: int | None = None
    fp32: str = ""
    low: str = ""
    answers: Counter[str] = field(default_factory=Counter)
    error_sq: float = 0.0
    signal_sq: float = 0.0

    def join(self, later: ReadStats) -> None:
        """Add the reads of later batches."""
        if later.differing and not self.differing:
            self.fp32, self.low = later.fp32, later.low
            self.producer = later.producer if self.sizes else self.producer
        self.batch = later.batch if self.batch is None else self.batch
        self.answers.update(later.answers)
        for name in ("reads", "differing", "faults", "error_sq", "signal_sq"):
            setattr(self, name, getattr(self, name) + getattr(later, name))

    @property
    def place(self) -> SiteId:
        """The op that computed the values, or the read itself where no op did."""
        return self.producer or SiteId(f"{self.layer or '(top)'}/{self.name}")

    def add(self, batch: int, differs: bool, fp32: str, low: str, *, repaired: bool | None = None) -> None:
        """Add one read; ``repaired`` says whether it differs once faults are repaired."""
        self.answers[fp32] += 1
        self.faults += differs and repaired is False
        if not self.reads or (differs and not self.differing):
            self.fp32, self.low = fp32, low
        if differs and self.batch is None:
            self.batch = batch
        self.reads += 1
        self.differing += differs


@dataclass(slots=True)
class PathRecord:
    """What was read along the paths of all batches.

    Attributes:
        reads: by line, layer and name, as text.
        paths: digests of the different sequences of sites that batches ran.
    """

    reads: dict[str, ReadStats] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)

    def join(self, later: PathRecord) -> None:
        """Add what later batches have read."""
        self.paths |= later.paths
        for key, stats in later.reads.items():
            if key in self.reads:
                self.reads[key].join(stats)
            else:
                self.reads[key] = replace(stats, answers=Counter(stats.answers))

    def stats(self, made: ReadStats) -> ReadStats:
        """Return the statistics of a line, which begin with the given ones."""
        key = repr((made.source, made.caller, made.layer, made.name))
        return self.reads.setdefault(key, made)

    def add(
        self, values: PathValues, traced: TracedModel, batch: int, repaired: PathValues | None = None
    ) -> None:
        """Add what one batch has read, and what it reads once its faults are repaired, if it has any."""
        if traced.path is None:
            return
        self.paths.add(sha256("\n".join(site.id for site in traced.sites).encode()).hexdigest())
        runs = [_Reads(run.results()) for run in (values, repaired) if run is not None]
        producers = dict(_producers(traced))
        for read in traced.path:
            self._add(read, producers.get(read.number), runs, batch)
        self._add_sizes(values, traced, batch, repaired)

    def _add_sizes(
        self, values: PathValues, traced: TracedModel, batch: int, repaired: PathValues | None
    ) -> None:
        """Add the ops whose sizes depend on values."""
        resized, sites = dict(values.resized), traced.site_of_node
        again = None if repaired is None else dict(repaired.resized)
        for node in traced.graph.nodes:
            site, record = sites.get(node.name), node.meta.get(META_KEY)
            if site is None or not (site.id in resized or (record is not None and record.by_values)):
                continue
            name = site.id.rpartition("/")[2].partition("#")[0]
            about = (name, ReadKind.CHOICE, site.layer, site.source, site.caller)
            size = shape_of(node.meta.get("val"))
            own = resized.get(site.id, size)
            stats = self.stats(ReadStats(*about, sizes=True, producer=site.id))
            if site.id in resized and not stats.differing:
                stats.producer = site.id
            healthy = None if again is None else site.id in again
            stats.add(batch, site.id in resized, size, own, repaired=healthy)

    def _add(self, read: ValueRead, producer: SiteId | None, runs: Sequence[_Reads], batch: int) -> None:
        first, last = runs[0], runs[-1] if len(runs) > 1 else None
        values = first.of(read)
        shown = [_shown(read, value) for value in values]
        for decided in read.decided:  # the line that decides may be another one than that which reads
            about = (read.name, ReadKind.CHOICE, read.layer, decided.source, decided.caller)
            stats = self.stats(ReadStats(*about, producer=producer))
            healthy = None if last is None else decided.differs(last.plain)
            stats.add(batch, decided.differs(first.plain), *shown, repaired=healthy)
        if read.kind is ReadKind.NUMBER and read.decided:
            return
        about = (read.name, read.kind, read.layer, read.source, read.caller)
        stats = self.stats(ReadStats(*about, producer=producer))
        healthy = None if last is None else last.chooses_differently(read)
        stats.add(batch, first.chooses_differently(read), *shown, repaired=healthy)
        fp32, low = values
        if read.kind is ReadKind.ARRAY and fp32.is_floating_point():
            difference = (low.double() - fp32.double()).nan_to_num(math.inf, math.inf, math.inf)
            stats.error_sq += float(difference.square().sum())
            stats.signal_sq += float(fp32.double().square().sum())


class _Reads:
    """The values of all reads in one run."""

    def __init__(self, found: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._found = found
        self.plain = {number: low.item() for number, (_, low) in found.items() if low.numel() == 1}

    def of(self, read: ValueRead) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values in FP32 and in 16 bits."""
        return self._found.get(read.number, (read.value, read.value))

    def chooses_differently(self, read: ValueRead) -> bool:
        """Return whether a boolean or an integer differs, alone or in an array."""
        fp32, low = (value.bool() if read.name == "bool" else value for value in self.of(read))
        exact = read.kind is ReadKind.CHOICE or not inexact(fp32)
        return exact and not torch.equal(fp32, low)


def _producers(traced: TracedModel) -> Iterator[tuple[int, SiteId]]:
    """Return the site that computes the values of each read."""
    sites = traced.site_of_node
    for node in traced.graph.nodes:
        if node.target is VALUE_READ and (site := sites.get(marked_values(node)[0].name)) is not None:
            yield mark_number(node), site.id


def _shown(read: ValueRead, value: torch.Tensor) -> str:
    if value.numel() != 1:
        return f"{shape_of(value)} values"
    found = python_value("item" if read.kind is ReadKind.ARRAY else read.name, value)
    return f"{found:.6g}" if isinstance(found, float) else str(found)


class _LeftPath(Exception):
    """Raised where a batch takes another path than the graph."""


class _PathChecker(Observer):
    """Compares what a run reads with what the trace has read."""

    def __init__(self, traced: TracedModel) -> None:
        self._reads = {read.number: read.value for read in traced.path or ()}

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Stop at the first difference."""
        if step.target is VALUE_READ:
            ((given, _),) = call.inputs.values()
            known = self._reads[mark_number(step.node)]
            if given.shape != known.shape or not torch.equal(given.cpu(), known):
                raise _LeftPath
        else:
            made = step.node.meta.get("val")
            if isinstance(made, torch.Tensor) and reference.shape != made.shape:
                raise _LeftPath
        return value


def takes_path(executor: LockStep, tensors: list[torch.Tensor], carried: Carried, seed: int) -> bool:
    """Return whether a batch takes the path that a graph is valid for, by a run of the reference."""
    device = executor.device
    checked = LockStep(executor.program, executor.placed, executor.backend, device, reference_only=True)
    with guarded(device):
        torch.manual_seed(seed)
        try:
            checked.run(tensors, _PathChecker(executor.program.traced), carried)
        except (_LeftPath, RunFailed):
            return False
    return True
