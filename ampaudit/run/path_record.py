"""Records the values that the model's code reads along a path, and whether 16 bits change its decisions."""

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
from ampaudit.run.device import guarded
from ampaudit.run.lockstep import CarriedState, LockStep, Observer, StepCall, shape_of
from ampaudit.run.meter import PathValues
from ampaudit.run.program import Step
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
        name: How the code reads them (``bool``, ``item``, ``numpy`` ...), or the op whose size they decide.
        kind: How Python uses them.
        layer: Path of the module whose forward reads them.
        source: The innermost line of the model's code.
        caller: The user's own line, if it is another one.
        sizes: Whether an op's sizes depend on values, rather than Python code.
        producer: The op that computed the values.
        reads: Number of reads.
        differing: Number of reads after which Python code takes another path in 16 bits.
        faults: Number of these that are only due to an earlier overflow.
        batch: Number of the first batch with a differing read.
        fp32: Text of FP32's value at the first differing read, or else at the first read.
        low: Text of the 16-bit run's value at the same read.
        answers: Counts of the values read in FP32.
        error_sq: Sum of squared differences, for arrays of floats.
        signal_sq: Sum of FP32's squares, for arrays of floats.
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
    """The values read along the paths of all batches.

    Attributes:
        reads: Statistics by a text key of line, layer and name.
        paths: Digests of the distinct sequences of sites that batches ran.
    """

    reads: dict[str, ReadStats] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)

    def join(self, later: PathRecord) -> None:
        """Add the reads of later batches."""
        self.paths |= later.paths
        for key, stats in later.reads.items():
            if key in self.reads:
                self.reads[key].join(stats)
            else:
                self.reads[key] = replace(stats, answers=Counter(stats.answers))

    def stats(self, initial: ReadStats) -> ReadStats:
        """Return the statistics of a line, starting from ``initial``."""
        key = repr((initial.source, initial.caller, initial.layer, initial.name))
        return self.reads.setdefault(key, initial)

    def add(
        self, values: PathValues, traced: TracedModel, batch: int, repaired: PathValues | None = None
    ) -> None:
        """Add the reads of one batch, and those of its repaired run, if any."""
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
            low_size = resized.get(site.id, size)
            stats = self.stats(ReadStats(*about, sizes=True, producer=site.id))
            if site.id in resized and not stats.differing:
                stats.producer = site.id
            healthy = None if again is None else site.id in again
            stats.add(batch, site.id in resized, size, low_size, repaired=healthy)

    def _add(self, read: ValueRead, producer: SiteId | None, runs: Sequence[_Reads], batch: int) -> None:
        first, last = runs[0], runs[-1] if len(runs) > 1 else None
        values = first.of(read)
        texts = [_as_text(read, value) for value in values]
        for decided in read.decided:  # the deciding line may differ from the reading line
            about = (read.name, ReadKind.CHOICE, read.layer, decided.source, decided.caller)
            stats = self.stats(ReadStats(*about, producer=producer))
            healthy = None if last is None else decided.differs(last.plain)
            stats.add(batch, decided.differs(first.plain), *texts, repaired=healthy)
        if read.kind is ReadKind.NUMBER and read.decided:
            return
        about = (read.name, read.kind, read.layer, read.source, read.caller)
        stats = self.stats(ReadStats(*about, producer=producer))
        healthy = None if last is None else last.chooses_differently(read)
        stats.add(batch, first.chooses_differently(read), *texts, repaired=healthy)
        fp32, low = values
        if read.kind is ReadKind.ARRAY and fp32.is_floating_point():
            difference = (low.double() - fp32.double()).nan_to_num(math.inf, math.inf, math.inf)
            stats.error_sq += float(difference.square().sum())
            stats.signal_sq += float(fp32.double().square().sum())


class _Reads:
    """The values of all reads in one run."""

    def __init__(self, values: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._values = values
        self.plain = {number: low.item() for number, (_, low) in values.items() if low.numel() == 1}

    def of(self, read: ValueRead) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values in FP32 and in 16 bits."""
        return self._values.get(read.number, (read.value, read.value))

    def chooses_differently(self, read: ValueRead) -> bool:
        """Return whether a boolean or an integer differs, alone or in an array."""
        fp32, low = (value.bool() if read.name == "bool" else value for value in self.of(read))
        exact = read.kind is ReadKind.CHOICE or not inexact(fp32)
        return exact and not torch.equal(fp32, low)


def _producers(traced: TracedModel) -> Iterator[tuple[int, SiteId]]:
    """Yield the number of each read with the site that computes its values."""
    sites = traced.site_of_node
    for node in traced.graph.nodes:
        if node.target is VALUE_READ and (site := sites.get(marked_values(node)[0].name)) is not None:
            yield mark_number(node), site.id


def _as_text(read: ValueRead, value: torch.Tensor) -> str:
    if value.numel() != 1:
        return f"{shape_of(value)} values"
    plain = python_value("item" if read.kind is ReadKind.ARRAY else read.name, value)
    return f"{plain:.6g}" if isinstance(plain, float) else str(plain)


class _LeftPath(Exception):
    """Raised when a batch leaves the path of the graph."""


class _PathChecker(Observer):
    """Compares the values that a run reads with those of the trace."""

    def __init__(self, traced: TracedModel) -> None:
        self._reads = {read.number: read.value for read in traced.path or ()}

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Stop at the first difference."""
        if step.target is VALUE_READ:
            ((reading, _),) = call.inputs.values()
            expected = self._reads[mark_number(step.node)]
            if reading.shape != expected.shape or not torch.equal(reading.cpu(), expected):
                raise _LeftPath
        else:
            traced_value = step.node.meta.get("val")
            if isinstance(traced_value, torch.Tensor) and reference.shape != traced_value.shape:
                raise _LeftPath
        return value


def takes_path(executor: LockStep, tensors: list[torch.Tensor], carried: CarriedState, seed: int) -> bool:
    """Run the reference to determine whether a batch takes the path for which a graph is valid."""
    device = executor.device
    checked = LockStep(executor.program, executor.placed, executor.backend, device, reference_only=True)
    with guarded(device):
        torch.manual_seed(seed)
        try:
            checked.run(tensors, _PathChecker(executor.program.traced), carried)
        except (_LeftPath, RunFailed):
            return False
    return True
