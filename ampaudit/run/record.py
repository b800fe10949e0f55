"""Records a run: one observation per site, the origins, and the sites that each origin poisons."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, PlainSerializer
from torch import fx

from ampaudit.core.errors import RunFailed
from ampaudit.core.instruments import ByInstrument
from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import ratio_db
from ampaudit.findings.finding import Gap
from ampaudit.run.attribution import Culprit
from ampaudit.run.comparison import ModelComparison
from ampaudit.run.device import guarded
from ampaudit.run.lockstep import CarriedState, LockStep, Observer, StepCall, shape_of
from ampaudit.run.measure import Observation
from ampaudit.run.meter import DecisionStats, PathValues
from ampaudit.run.outputs import OutputComparison, merge_outputs
from ampaudit.run.program import Step
from ampaudit.trace.converted import CodeDifference
from ampaudit.trace.flatten import VALUE_READ, mark_number, marked_values
from ampaudit.trace.functional import WriteThrough, overload_of
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.opnames import base_name
from ampaudit.trace.path.reads import ReadKind, ValueRead, python_value
from ampaudit.trace.replay import META_KEY
from ampaudit.trace.values import LOW_PRECISION_DTYPES, inexact

# in deep models, FP32 itself is accurate to 100 dB or more, and one rounding to 16 bits to 70 dB
AGREEMENT_DB = 80.0
RIGHT_DB = 20.0  # accuracy from which a value counts as correct although it depends on inf or NaN
Fate = Literal["reaches the output", "recovered"]
# sorted, so that equal records are written as equal files
_Sites = Annotated[set[SiteId], PlainSerializer(sorted, return_type=list[SiteId])]
_Numbers = Annotated[set[int], PlainSerializer(sorted, return_type=list[int])]


@dataclass(slots=True)
class ReadStats:
    """The reads of values by one line of the model's code, over all batches."""

    name: str  # how the code reads them (``bool``, ``item``, ``numpy`` ...), or the op whose size they decide
    kind: ReadKind  # how Python uses them
    layer: str  # path of the module whose forward reads them
    source: SourceLine | None  # the innermost line of the model's code
    caller: SourceLine | None  # the user's own line, if it is another one
    sizes: bool = False  # whether the values decide the sizes of an op, rather than what Python code does
    producer: SiteId | None = None  # the op that computed the values
    reads: int = 0  # number of reads
    differing: int = 0  # number of reads after which Python code takes another path in 16 bits
    faults: int = 0  # number of differing reads that are only due to an earlier overflow
    batch: int | None = None  # number of the first batch with a differing read
    fp32: str = ""  # text of FP32's value at the first differing read, or else at the first read
    low: str = ""  # text of the 16-bit run's value at the same read
    answers: Counter[str] = field(default_factory=Counter)  # counts of the values read in FP32
    error_sq: float = 0.0  # sum of squared differences, for arrays of floats
    signal_sq: float = 0.0  # sum of FP32's squares, for arrays of floats

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
    """The values read along the paths of all batches."""

    # statistics by a text key of line, layer and name
    reads: dict[str, ReadStats] = field(default_factory=dict)
    # digests of the distinct sequences of sites that batches ran
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
        sites = traced.site_of_node
        producers = {
            mark_number(node): site.id
            for node in traced.graph.nodes
            if node.target is VALUE_READ and (site := sites.get(marked_values(node)[0].name)) is not None
        }
        for read in traced.path:
            self._add_read(read, producers.get(read.number), runs, batch)
        # ops whose sizes depend on values
        resized = dict(values.resized)
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

    def _add_read(self, read: ValueRead, producer: SiteId | None, runs: Sequence[_Reads], batch: int) -> None:
        first, last = runs[0], runs[-1] if len(runs) > 1 else None
        values = first.of(read)
        texts = [_as_text(read, value) for value in values]
        for decision in read.decisions:  # the deciding line may differ from the reading line
            about = (read.name, ReadKind.CHOICE, read.layer, decision.source, decision.caller)
            stats = self.stats(ReadStats(*about, producer=producer))
            healthy = None if last is None else decision.differs(last.plain)
            stats.add(batch, decision.differs(first.plain), *texts, repaired=healthy)
        if read.kind is ReadKind.NUMBER and read.decisions:
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


def takes_path(executor: LockStep, carried: CarriedState, seed: int) -> bool:
    """Run the reference to determine whether a batch takes the path for which a graph is valid."""
    device = executor.device
    checked = LockStep(executor.program, executor.placed, executor.backend, device, reference_only=True)
    with guarded(device):
        torch.manual_seed(seed)
        try:
            checked.run(list(carried.inputs), _PathChecker(executor.program.traced), carried)
        except (_LeftPath, RunFailed):
            return False
    return True


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """The update of a 16-bit buffer by one forward pass."""

    name: str  # path of the buffer
    site: SiteId  # the op that writes it
    moved: int  # number of elements that change in FP32
    stalled: int  # number of these that do not change in 16 bits
    counts: bool  # whether the buffer holds whole numbers before and after
    example: float  # value of the first element that stalls


def buffer_updates(executor: LockStep) -> list[BufferUpdate]:
    """Return the buffer updates of the last run that stalled."""
    updates: list[BufferUpdate] = []
    places = {place.node: place for place in executor.program.traced.placeholders}
    for node, (reference, value) in executor.buffers.items():
        place, site = places[node.name], _writer(executor, node)
        if place.dtype not in LOW_PRECISION_DTYPES or site is None:
            continue
        before = executor.converted.masters[node.name].detach().to(reference.device)
        stalled = (reference != before) & (value == executor.backend.represent(before, place.dtype))
        count = int(stalled.sum())
        if count:
            changed = int((reference != before).sum())
            whole = bool((before == before.round()).all() & (reference == reference.round()).all())
            example = float(value[stalled][0])
            updates.append(BufferUpdate(place.name, site, changed, count, whole, example))
    return updates


_ARITHMETIC = having("arithmetic") | {"batch_norm", "instance_norm", "_native_batch_norm_legit"}


def _writer(executor: LockStep, buffer: fx.Node) -> SiteId | None:
    """Return the last op that computes a new value for a buffer, or for a view of it."""
    aliases, writer = {buffer}, None
    value = executor.program.updated.get(buffer)
    if value is not None:
        while isinstance(value.target, WriteThrough):  # what it writes into a part
            value = value.all_input_nodes[-1]
        site, op = executor.program.traced.site_of_node.get(value.name), overload_of(value.target)
        computes = op is not None and base_name(op).rstrip("_") in _ARITHMETIC
        return site.id if site is not None and computes else None
    for step in executor.program.steps:
        targets = [step.node.args[p] for p in step.mutates if p < len(step.node.args)]
        if step.site is not None and any(node in aliases for node in targets):
            aliases.add(step.node)
            op = overload_of(step.target)
            writer = step.site.id if op is not None and base_name(op).rstrip("_") in _ARITHMETIC else None
        elif not step.makes_values and aliases.intersection(step.node.all_input_nodes):
            aliases.add(step.node)
    return writer


@dataclass(slots=True)
class OutputDifference:
    """One output against the FP32 model, summed over the batches that differ."""

    name: str  # name of the output
    problem: str | None = None  # reason why it cannot be compared, if so
    # whether it holds integers; sums of squares are then counts of (differing) elements
    integers: bool = False
    ref_sq: float = 0.0  # sum of squares of the FP32 model's output
    err_sq: float = 0.0  # sum of squares of the 16-bit run's error
    # sum of squares of the error of the same code in FP32, which is due to the code alone
    code_err_sq: float = 0.0

    @property
    def sqnr_db(self) -> float:
        """Accuracy of the 16-bit run; infinite where it is exact."""
        return ratio_db(self.ref_sq, self.err_sq)

    @property
    def code_sqnr_db(self) -> float:
        """Accuracy of the 16-bit code path when computed in FP32."""
        return ratio_db(self.ref_sq, self.code_err_sq)

    @property
    def agrees(self) -> bool:
        """Whether the code makes no difference to this output."""
        return self.problem is None and self.code_sqnr_db >= AGREEMENT_DB

    def merge(self, other: OutputDifference) -> None:
        """Add another batch."""
        self.problem = self.problem or other.problem
        self.integers |= other.integers
        self.ref_sq += other.ref_sq
        self.err_sq += other.err_sq
        self.code_err_sq += other.code_err_sq


@dataclass(slots=True)
class CodeRecord:
    """The results of the eager runs of the FP32 model."""

    batches: int = 0  # number of batches run and compared
    failure: str | None = None  # reason why a batch could not be run, if so
    # whether the FP32 model could not be traced, so that the traces could not be compared
    untraced: bool = False
    reads: tuple[SourceLine, ...] = ()  # lines of the model's code that read a dtype in the differing trace
    place: CodeDifference | None = None  # the first difference between the traces
    # differences of the outputs by name; empty if 16 bits run the same code as FP32
    outputs: dict[str, OutputDifference] = field(default_factory=dict)

    def join(self, later: CodeRecord) -> None:
        """Add the record of later batches."""
        self.batches += later.batches
        self.failure = self.failure or later.failure
        self.untraced |= later.untraced
        self.note(later.outputs.values(), later.place, later.reads)

    def note(
        self,
        differences: Iterable[OutputDifference],
        place: CodeDifference | None,
        reads: tuple[SourceLine, ...],
    ) -> None:
        """Add a batch whose outputs differ from those of the FP32 model."""
        self.place = self.place or place
        self.reads = self.reads or reads
        for difference in differences:
            if difference.name in self.outputs:
                self.outputs[difference.name].merge(difference)
            else:
                self.outputs[difference.name] = replace(difference)


def _in_order(gaps: set[Gap]) -> list[Gap]:
    return sorted(gaps, key=lambda gap: (gap.site, gap.kind, gap.op, gap.reason))


@dataclass(frozen=True, slots=True)
class Origin:
    """A site that breaks by its own fault, with intact inputs."""

    site: SiteId  # the site that breaks
    batch: int  # number of the first batch in which it breaks, from 0
    # sites that become inf or NaN because of it if nothing is repaired, in graph order
    poisons: tuple[SiteId, ...]
    # whether inf or NaN reaches an output of the model, or is lost on the way
    fate: Fate = "reaches the output"
    # sites that read its inf or NaN and return finite values, in graph order
    hidden_at: tuple[SiteId, ...] = ()
    hidden_sqnr_db: float | None = None  # the worst accuracy at those sites; ``None`` if exact
    buffer: str | None = None  # name of the buffer that it leaves inf or NaN, if any
    # name and FP32 peak of an input of the model that it reads and the format cannot hold, if any
    input: tuple[str, float] | None = None

    @property
    def harms(self) -> bool:
        """Whether values remain wrong because of it, rather than become finite and accurate again."""
        right = self.hidden_sqnr_db is None or self.hidden_sqnr_db >= RIGHT_DB
        return not (self.fate == "recovered" and right)


@dataclass(frozen=True, slots=True)
class StateFault:
    """A fault of the function that computes a step's inputs from the outputs of the previous step."""

    name: str  # name of the input, which is finite in FP32 and not in 16 bits
    op: str  # the first op that breaks; empty if unknown
    line: SourceLine | None  # its line in the function's code
    peak: float  # largest FP32 magnitude among the broken elements
    broken: int  # number of broken elements
    nan: int  # number of them that are NaN
    elements: int  # number of elements of the input


@dataclass(slots=True)
class StepObservation:
    """One step of one batch."""

    batch: int  # number of the batch, from 0
    step: int  # number of the step, from 1
    # sums of squared errors and of FP32's squares after repairs, by output
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    # least headroom of the step's 16-bit values; negative if one overflows
    headroom_bits: float | None = None
    headroom_at: str = ""  # the site, or input, with the least headroom
    origins: tuple[SiteId, ...] = ()  # sites that break by their own fault
    # faults of the function that computes the next inputs
    faults: list[StateFault] = field(default_factory=list)
    # next inputs, such as the chosen token, that would differ in the 16-bit run
    flipped: list[str] = field(default_factory=list)
    poisoned: bool = False  # whether an earlier step's fault reaches an output if nothing is repaired


@dataclass(slots=True)
class RunRecord:
    """The record of one audit run."""

    # parts of an audit are sent as JSON, except the comparison with a reference model, which holds tensors
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        arbitrary_types_allowed=True, ser_json_inf_nan="constants"
    )

    device: str  # ``cpu`` or ``cuda``
    backend: str  # ``emulated`` or ``native``
    batches: int = 0  # number of batches run
    names: dict[int, str] = field(default_factory=dict)  # names of the batches that have one, by number
    # measurements by site; views share their source's
    observations: dict[SiteId, Observation] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)  # independent origins, in graph order
    # sites whose -inf is a saturated attention mask that a later softmax turns into zeros
    masks: _Sites = field(default_factory=set)
    # sites near the limit because they read a mask, harmless or not
    by_design: _Sites = field(default_factory=set)
    # parts that the run did not examine, one per site and kind
    gaps: Annotated[set[Gap], PlainSerializer(_in_order, return_type=list[Gap])] = field(default_factory=set)
    # indices selected in stacks of matrices, such as experts, by name of the stack
    chosen: dict[str, _Numbers] = field(default_factory=dict)
    # reason why the twin of an op was not checked, by op; empty if it agrees with the kernel
    twins: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # wall time per phase
    # records of instruments, by their names
    parts: Annotated[dict[str, Any], ByInstrument("part")] = field(default_factory=dict)
    # comparison of each output, without repairs, in its worst batch
    outputs: dict[str, OutputComparison] = field(default_factory=dict)
    # comparison of edited code in FP32 with the user's FP32 model, by output; empty without edits
    edited: dict[str, OutputComparison] = field(default_factory=dict)
    # choices of ops that turn floats into integers, booleans or whole numbers, by site
    decisions: dict[SiteId, DecisionStats] = field(default_factory=dict)
    buffers: dict[str, BufferUpdate] = field(default_factory=dict)  # updates of buffers that stall, by name
    # ops at which the errors of inaccurate outputs enter
    culprits: list[Culprit] = field(default_factory=list)
    # differences between the model's code in 16 bits and in FP32
    code: CodeRecord = field(default_factory=CodeRecord)
    # values that the model's code reads, if it was traced along the path of its inputs
    path: PathRecord = field(default_factory=PathRecord)
    # observations of each step; empty without ``--steps``
    steps: list[StepObservation] = field(default_factory=list)
    traces: int = 0  # number of times the model was traced
    comparison: ModelComparison | None = None  # comparison with the reference model of ``--against``
    fed_back: str = ""  # description of the function that computes the inputs of a step
    # FP32 peaks of the batches' inputs, by number of the graph and placeholder, for measured rules
    input_peaks: dict[int, dict[str, float]] = field(default_factory=dict)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add wall-clock time to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the wall-clock time of a block to a phase, unless it fails."""
        started = time.perf_counter()
        yield
        self.add_seconds(phase, time.perf_counter() - started)

    def drain(self) -> RunRecord:
        """Return everything recorded so far as a new record, and empty this one."""
        drained, empty = replace(self), RunRecord(self.device, self.backend)
        for item in fields(self):
            setattr(self, item.name, getattr(empty, item.name))
        return drained

    def measured(self) -> RunRecord:
        """Return the part of the record that a policy's measured rules read."""
        peaks = {
            site: Observation(ref_peak=observation.ref_peak)
            for site, observation in self.observations.items()
        }
        return RunRecord(
            self.device,
            self.backend,
            observations=peaks,
            masks=self.masks,
            by_design=self.by_design,
            input_peaks=self.input_peaks,
        )

    def join(self, later: RunRecord) -> None:
        """Add the record of later batches.

        Records are joined in the order of their batches, so that the result, including the rounding of its
        sums, does not depend on which machine ran which batch.
        """
        for site, observation in later.observations.items():
            self.observation(site).join(observation)
        for site, choices in later.decisions.items():
            self.decisions.setdefault(site, DecisionStats()).add(choices.elements, choices.differing)
        self.add_origins(later.origins)
        self.masks |= later.masks
        self.by_design |= later.by_design
        self.gaps |= later.gaps
        for stack, numbers in later.chosen.items():
            self.chosen.setdefault(stack, set()).update(numbers)
        self.batches += later.batches
        self.traces += later.traces
        self.names |= later.names
        self.twins |= {op: self.twins.get(op) or why for op, why in later.twins.items()}
        for phase, seconds in later.seconds.items():
            self.add_seconds(phase, seconds)
        for name, part in later.parts.items():
            self.parts[name] = self.parts[name].joined(part) if name in self.parts else part
        merge_outputs(self.outputs, later.outputs)
        merge_outputs(self.edited, later.edited)
        self.buffers |= later.buffers
        self.code.join(later.code)
        self.path.join(later.path)
        self.steps += later.steps
        worst, other = self.comparison, later.comparison
        if worst is None or (other is not None and other.wrong and not worst.wrong):
            self.comparison = other
        self.fed_back = self.fed_back or later.fed_back
        for graph, peaks in later.input_peaks.items():
            mine = self.input_peaks.setdefault(graph, {})
            mine.update({name: max(mine.get(name, 0.0), peak) for name, peak in peaks.items()})

    def add_origins(self, later: Iterable[Origin]) -> None:
        """Add the origins of later batches: the first of each site, or the first that harms."""
        by_site = {origin.site: origin for origin in self.origins}
        for origin in later:
            if origin.site not in by_site or (origin.harms and not by_site[origin.site].harms):
                by_site[origin.site] = origin
        self.origins = list(by_site.values())

    def observation(self, site: SiteId) -> Observation:
        """Return the observation of a site, creating it if necessary."""
        return self.observations.setdefault(site, Observation())
