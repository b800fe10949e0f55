"""Records what the model's code reads along a path, and whether it decides the same way in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ampaudit.core.errors import RunFailed
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.run.guards import guarded
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer, StepCall
from ampaudit.run.path import shape_of
from ampaudit.run.step import Step
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.marks import VALUE_READ, mark_number, marked_values
from ampaudit.trace.path.reads import ReadKind, ValueRead, python_value
from ampaudit.trace.replay import META_KEY

__all__ = ["PathRecord", "PathValues", "ReadStats", "takes_path"]


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
        batch: number of the first batch in which it does.
        fp32: what was read in FP32 the first time that it differs, as text; otherwise the first time.
        low: the same in 16 bits.
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
    batch: int | None = None
    fp32: str = ""
    low: str = ""
    error_sq: float = 0.0
    signal_sq: float = 0.0

    def add(self, batch: int, differs: bool, fp32: str, low: str) -> None:
        """Add one read."""
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
        reads: by file, line and name.
        paths: the different sequences of sites that batches ran.
    """

    reads: dict[tuple[Any, ...], ReadStats] = field(default_factory=dict)
    paths: set[int] = field(default_factory=set)

    def stats(self, made: ReadStats) -> ReadStats:
        """Return the statistics of a line, which begin with the given ones."""
        key = (made.source, made.caller, made.layer, made.name)
        return self.reads.setdefault(key, made)

    def add(self, values: PathValues, traced: TracedModel, batch: int) -> None:
        """Add what one batch has read."""
        if traced.path is None:
            return
        self.paths.add(hash(tuple(site.id for site in traced.sites)))
        found = values.results()
        numbers = {number: low for number, (_, low) in found.items() if low.numel() == 1}
        plain = {number: low.item() for number, low in numbers.items()}
        producers = dict(_producers(traced))
        for read in traced.path:
            fp32, low = found.get(read.number, (read.value, read.value))
            self._add(read, producers.get(read.number), (fp32, low), plain, batch)
        self._add_sizes(values, traced, batch)

    def _add_sizes(self, values: PathValues, traced: TracedModel, batch: int) -> None:
        """Add the ops whose sizes depend on values."""
        resized, sites = dict(values.resized), traced.site_of_node
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
            stats.add(batch, site.id in resized, size, own)

    def _add(
        self,
        read: ValueRead,
        producer: SiteId | None,
        values: tuple[torch.Tensor, torch.Tensor],
        plain: Mapping[int, Any],
        batch: int,
    ) -> None:
        shown = [_shown(read, value) for value in values]
        for decided in read.decided:  # the line that decides may be another one than that which reads
            about = (read.name, ReadKind.CHOICE, read.layer, decided.source, decided.caller)
            stats = self.stats(ReadStats(*about, producer=producer))
            stats.add(batch, decided.differs(plain), *shown)
        if read.kind is ReadKind.NUMBER and read.decided:
            return
        stats = self.stats(
            ReadStats(read.name, read.kind, read.layer, read.source, read.caller, producer=producer)
        )
        fp32, low = (value.bool() if read.name == "bool" else value for value in values)
        if read.kind is ReadKind.ARRAY and fp32.is_floating_point():
            difference = (low.double() - fp32.double()).nan_to_num(math.inf, math.inf, math.inf)
            stats.error_sq += float(difference.square().sum())
            stats.signal_sq += float(fp32.double().square().sum())
        stats.add(batch, read.kind is ReadKind.CHOICE and not torch.equal(fp32, low), *shown)


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


class PathValues:
    """Collects what the model's code reads during one run; values stay on their device until the end.

    Attributes:
        resized: sites whose result has another size in 16 bits, with that size.
    """

    def __init__(self) -> None:
        self._read: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.resized: list[tuple[SiteId, str]] = []

    def observe(self, step: Step, reference: Any, call: StepCall) -> None:
        """Keep the values of a read, and the sizes that choices decide."""
        if call.resized is not None and step.site is not None:
            self.resized.append((step.site.id, call.resized))
        if step.target is VALUE_READ:
            ((reference, value),) = call.inputs.values()
            copied = reference.detach().clone()
            low = copied if value is reference else value.detach().clone()
            self._read.append((mark_number(step.node), copied, low))

    def results(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return both values of each read, fetched from their device together."""
        numbers = [number for number, _, _ in self._read]
        fp32 = fetched([reference for _, reference, _ in self._read])
        low = fetched([value for _, _, value in self._read])
        return dict(zip(numbers, zip(fp32, low, strict=True), strict=True))


def fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU, those of one dtype at once."""
    found: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        group = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
        flat = torch.cat([tensor.reshape(-1) for _, tensor in group]).cpu()
        parts = flat.split([tensor.numel() for _, tensor in group])
        found |= {i: part.reshape(tensor.shape) for (i, tensor), part in zip(group, parts, strict=True)}
    return [found[i] for i in range(len(tensors))]


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


def takes_path(executor: LockStep, tensors: list[torch.Tensor], seed: int) -> bool:
    """Return whether a batch takes the path that a graph is valid for, by a run of the reference."""
    device = executor.device
    checked = LockStep(executor.program, executor.converted, executor.backend, device, reference_only=True)
    with guarded(device):
        torch.manual_seed(seed)
        try:
            checked.run(tensors, _PathChecker(executor.program.traced))
        except (_LeftPath, RunFailed):
            return False
    return True
