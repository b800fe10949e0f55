"""Records a run: one observation per site, the origins, and the sites that each would have poisoned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, PlainSerializer
from torch import fx

from ampaudit.core.decibels import ratio_db
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.report.gap import Gap
from ampaudit.run.against.comparison import ModelComparison
from ampaudit.run.attribution import Culprit
from ampaudit.run.backward.record import GradientRecord
from ampaudit.run.decisions import DecisionStats
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observation import Observation
from ampaudit.run.outputs import OutputComparison, merge_outputs
from ampaudit.run.path_record import PathRecord
from ampaudit.run.sensitivity.probe import SensitivityRecord
from ampaudit.trace.compare import CodeDifference
from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import base_name
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = [
    "Fate",
    "Origin",
    "OutputDifference",
    "RunRecord",
    "StateFault",
    "StepObservation",
    "buffer_updates",
]

# FP32's own noise in deep models is 100 dB and better, a 16-bit rounding 70 dB
AGREEMENT_DB = 80.0
RIGHT_DB = 20.0  # a value that was inf on its way and comes out this accurate was not harmed
Fate = Literal["reaches the output", "recovered"]
# the same file each time
_Sites = Annotated[set[SiteId], PlainSerializer(sorted, return_type=list[SiteId])]
_Numbers = Annotated[set[int], PlainSerializer(sorted, return_type=list[int])]


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """The update of a 16-bit buffer by one forward pass.

    Attributes:
        name: the buffer's path.
        site: the op that writes it.
        moved: elements that FP32 changes.
        stalled: those among them that are as before in 16 bits.
        counts: whether what is there before and after is whole numbers.
        example: value of the first that stalls.
    """

    name: str
    site: SiteId
    moved: int
    stalled: int
    counts: bool
    example: float


def buffer_updates(executor: LockStep) -> list[BufferUpdate]:
    """Return the updates of the last run that stalled."""
    found: list[BufferUpdate] = []
    places = {place.node: place for place in executor.program.traced.placeholders}
    for node, (reference, value) in executor.buffers.items():
        place, site = places[node.name], _writer(executor, node)
        if place.dtype not in LOW_PRECISION_DTYPES or site is None:
            continue
        before = executor.converted.masters[node.name].detach().to(reference.device)
        stalled = (reference != before) & (value == executor.backend.represent(before, place.dtype))
        count = int(stalled.sum())
        if count:
            moved = int((reference != before).sum())
            whole = bool((before == before.round()).all() & (reference == reference.round()).all())
            example = float(value[stalled][0])
            found.append(BufferUpdate(place.name, site, moved, count, whole, example))
    return found


_ARITHMETIC = frozenset(
    """
    add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_ copy_ batch_norm instance_norm _native_batch_norm_legit
    """.split()
)


def _writer(executor: LockStep, buffer: fx.Node) -> SiteId | None:
    """Return the last op that computes what it writes to a buffer, or to a view of it."""
    shown, writer = {buffer}, None
    for step in executor.program.steps:
        written = [step.node.args[p] for p in step.mutates if p < len(step.node.args)]
        if step.site is not None and any(node in shown for node in written):
            shown.add(step.node)
            op = overload_of(step.target)
            writer = step.site.id if op is not None and base_name(op) in _ARITHMETIC else None
        elif not step.makes_values and shown.intersection(step.node.all_input_nodes):
            shown.add(step.node)
    return writer


@dataclass(slots=True)
class OutputDifference:
    """One output against the FP32 model, summed over the batches that differ.

    Attributes:
        name: of the output.
        problem: why it cannot be compared, if so.
        integers: whether it holds integers; squares are then counts of elements, and of those that differ.
        ref_sq: sum of squares of the FP32 model's output.
        err_sq: of the 16-bit run's error.
        code_err_sq: of the error that the same code has in FP32: what the code alone does.
    """

    name: str
    problem: str | None = None
    integers: bool = False
    ref_sq: float = 0.0
    err_sq: float = 0.0
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
    """The results of the eager runs of the FP32 model.

    Attributes:
        batches: how many were run and compared.
        failure: why one could not be run.
        untraced: whether the FP32 model could not be traced either, to compare the traces.
        reads: lines that read a precision, of the trace that differs.
        place: where the traces differ first.
        outputs: by name; empty where 16 bits take the code of FP32.
    """

    batches: int = 0
    failure: str | None = None
    untraced: bool = False
    reads: tuple[SourceLine, ...] = ()
    place: CodeDifference | None = None
    outputs: dict[str, OutputDifference] = field(default_factory=dict)

    def join(self, later: CodeRecord) -> None:
        """Add what later batches showed."""
        self.batches += later.batches
        self.failure = self.failure or later.failure
        self.untraced |= later.untraced
        self.note(later.outputs.values(), later.place, later.reads)

    def note(
        self, found: Iterable[OutputDifference], place: CodeDifference | None, reads: tuple[SourceLine, ...]
    ) -> None:
        """Add a batch whose outputs differ from those of the FP32 model."""
        self.place = self.place or place
        self.reads = self.reads or reads
        for difference in found:
            if difference.name in self.outputs:
                self.outputs[difference.name].merge(difference)
            else:
                self.outputs[difference.name] = replace(difference)


def _in_order(gaps: set[Gap]) -> list[Gap]:
    return sorted(gaps, key=lambda gap: (gap.site, gap.kind, gap.op, gap.reason))


@dataclass(frozen=True, slots=True)
class Origin:
    """A site that breaks by its own fault, with intact inputs.

    Attributes:
        site: where.
        batch: number of the first batch in which it happened, from 0.
        poisons: sites that become inf or NaN because of it when nothing is repaired, in graph order.
        fate: whether an output of the model is inf or NaN because of it, or all is finite again before.
        hidden_at: sites that take in inf or NaN from it and give finite values, in graph order.
        hidden_sqnr_db: the worst accuracy at those; ``None`` where they are exact.
        buffer: name of the buffer that it leaves inf or NaN, whatever becomes of the value in this run.
    """

    site: SiteId
    batch: int
    poisons: tuple[SiteId, ...]
    fate: Fate = "reaches the output"
    hidden_at: tuple[SiteId, ...] = ()
    hidden_sqnr_db: float | None = None
    buffer: str | None = None

    @property
    def harms(self) -> bool:
        """Whether values stay wrong because of it; otherwise they become finite and right again."""
        right = self.hidden_sqnr_db is None or self.hidden_sqnr_db >= RIGHT_DB
        return not (self.fate == "recovered" and right)


@dataclass(frozen=True, slots=True)
class StateFault:
    """A fault of the function that makes a step's inputs from the last one's outputs.

    Attributes:
        name: the input that is not finite in 16 bits only.
        op: the op that breaks, of which no other input was broken; empty if that is not known.
        line: of the function's code.
        peak: the largest FP32 value among the broken elements.
        broken: how many there are.
        nan: how many of them are NaN.
        elements: of the input.
    """

    name: str
    op: str
    line: SourceLine | None
    peak: float
    broken: int
    nan: int
    elements: int


@dataclass(slots=True)
class StepObservation:
    """One step of one batch.

    Attributes:
        batch: number of the batch, from 0.
        step: number of the step, from 1.
        errors: by output, the sums of squared errors and of squares in FP32, after repairs.
        headroom_bits: least headroom of the step's 16-bit values; negative where one overflows.
        headroom_at: the site, or input, that has it.
        origins: sites that break by their own fault.
        faults: of the function that makes the next inputs.
        flipped: next inputs, such as the chosen token, that would be others in the 16-bit run.
        poisoned: whether an earlier step's fault leaves inf or NaN in an output, if nothing is repaired.
    """

    batch: int
    step: int
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    headroom_bits: float | None = None
    headroom_at: str = ""
    origins: tuple[SiteId, ...] = ()
    faults: list[StateFault] = field(default_factory=list)
    flipped: list[str] = field(default_factory=list)
    poisoned: bool = False


@dataclass(slots=True)
class RunRecord:
    """The record of one audit run.

    Attributes:
        device: ``cpu`` or ``cuda``.
        backend: ``emulated`` or ``native``.
        batches: batches run.
        names: of the batches that have one, by number.
        observations: by site id; views share their source's values and have none of their own.
        origins: independent origins, in graph order.
        masks: sites whose -inf is a saturated attention mask that a later softmax turns into zeros.
        by_design: sites near the limit because they take in a mask, harmless or not.
        gaps: what the run did not look at, one per site and kind.
        chosen: of stacks of matrices such as experts, by name, the numbers that tensors chose.
        twins: by op, why its twin was not checked; empty for one that agrees with the op's kernel.
        seconds: wall time per phase.
        gradients: what the backward pass showed, if there was one.
        sensitivity: what probes found, if there were some.
        outputs: by name, the worst batch of each output, as it is when nothing is repaired.
        edited: by name, what edited code gives in FP32 against the user's FP32 model; empty without edits.
        decisions: by site, for ops that turn floats into integers, booleans or whole numbers.
        buffers: by name, updates of buffers of which something stalls.
        culprits: where the errors of outputs that are too inaccurate enter.
        code: where the model's code does something else than in FP32.
        path: what the model's code reads, where it was traced along the path of its inputs.
        steps: what each step showed; empty without ``--steps``.
        traces: how often the model was traced.
        comparison: with the reference model of ``--against``.
        fed_back: what makes the inputs of a step, in words.
        given: peaks of the batches' tensors, by number of the graph and placeholder, for measured rules.
    """

    # parts of an audit travel as JSON; what a reference model gave, which holds tensors, never does
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        arbitrary_types_allowed=True, ser_json_inf_nan="constants"
    )

    device: str
    backend: str
    batches: int = 0
    names: dict[int, str] = field(default_factory=dict)
    observations: dict[SiteId, Observation] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)
    masks: _Sites = field(default_factory=set)
    by_design: _Sites = field(default_factory=set)
    gaps: Annotated[set[Gap], PlainSerializer(_in_order, return_type=list[Gap])] = field(default_factory=set)
    chosen: dict[str, _Numbers] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    gradients: GradientRecord | None = None
    sensitivity: SensitivityRecord | None = None
    outputs: dict[str, OutputComparison] = field(default_factory=dict)
    edited: dict[str, OutputComparison] = field(default_factory=dict)
    decisions: dict[SiteId, DecisionStats] = field(default_factory=dict)
    buffers: dict[str, BufferUpdate] = field(default_factory=dict)
    culprits: list[Culprit] = field(default_factory=list)
    code: CodeRecord = field(default_factory=CodeRecord)
    path: PathRecord = field(default_factory=PathRecord)
    steps: list[StepObservation] = field(default_factory=list)
    traces: int = 0
    comparison: ModelComparison | None = None
    fed_back: str = ""
    given: dict[int, dict[str, float]] = field(default_factory=dict)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add wall-clock time to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def taken(self) -> RunRecord:
        """Return what was recorded since this was last called, as a record of its own."""
        found, empty = replace(self), RunRecord(self.device, self.backend)
        for item in fields(self):
            setattr(self, item.name, getattr(empty, item.name))
        return found

    def measured(self) -> RunRecord:
        """Return what a policy's measured rules look at."""
        peaks = {site: Observation(ref_peak=seen.ref_peak) for site, seen in self.observations.items()}
        return RunRecord(
            *(self.device, self.backend),
            observations=peaks,
            masks=self.masks,
            by_design=self.by_design,
            given=self.given,
        )

    def join(self, later: RunRecord) -> None:
        """Add the record of later batches.

        Records are joined in the order of their batches, so that the result, and the rounding of its sums,
        does not depend on who has run which.
        """
        self._join_sites(later)
        self.batches += later.batches
        self.traces += later.traces
        self.names |= later.names
        self.twins |= {op: self.twins.get(op) or why for op, why in later.twins.items()}
        for phase, seconds in later.seconds.items():
            self.add_seconds(phase, seconds)
        if later.gradients is not None:
            if self.gradients is None:
                self.gradients = later.gradients.emptied()
            self.gradients.join(later.gradients)
        if later.sensitivity is not None:
            self.sensitivity = self.sensitivity or SensitivityRecord()
            self.sensitivity.join(later.sensitivity)
        merge_outputs(self.outputs, later.outputs)
        merge_outputs(self.edited, later.edited)
        self.buffers |= later.buffers
        self.code.join(later.code)
        self.path.join(later.path)
        self.steps += later.steps
        known, found = self.comparison, later.comparison
        if known is None or (found is not None and found.wrong and not known.wrong):
            self.comparison = found
        self.fed_back = self.fed_back or later.fed_back
        for graph, peaks in later.given.items():
            mine = self.given.setdefault(graph, {})
            mine.update({name: max(mine.get(name, 0.0), peak) for name, peak in peaks.items()})

    def _join_sites(self, later: RunRecord) -> None:
        for site, seen in later.observations.items():
            self.observation(site).join(seen)
        for site, choices in later.decisions.items():
            self.decisions.setdefault(site, DecisionStats()).add(choices.elements, choices.differing)
        self.add_origins(later.origins)
        self.masks |= later.masks
        self.by_design |= later.by_design
        self.gaps |= later.gaps
        for stack, numbers in later.chosen.items():
            self.chosen.setdefault(stack, set()).update(numbers)

    def add_origins(self, later: Iterable[Origin]) -> None:
        """Add the origins of later batches: the first of each site, or the first that harms."""
        known = {origin.site: origin for origin in self.origins}
        for origin in later:
            if origin.site not in known or (origin.harms and not known[origin.site].harms):
                known[origin.site] = origin
        self.origins = list(known.values())

    def observation(self, site: SiteId) -> Observation:
        """Return the observation of a site, creating it if necessary."""
        return self.observations.setdefault(site, Observation())
