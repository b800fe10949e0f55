"""Records a run: one observation per site, the origins, and the sites that each would have poisoned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, PlainSerializer
from torch import fx

from ampaudit.core.decibels import ratio_db
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.report.finding import Gap
from ampaudit.run.against.comparison import ModelComparison
from ampaudit.run.attribution import Culprit
from ampaudit.run.backward.record import GradientRecord
from ampaudit.run.lockstep import LockStep
from ampaudit.run.measure import Observation
from ampaudit.run.meter import DecisionStats
from ampaudit.run.outputs import OutputComparison, merge_outputs
from ampaudit.run.path_record import PathRecord
from ampaudit.run.sensitivity.probe import SensitivityRecord
from ampaudit.trace.converted import CodeDifference
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
        name: Path of the buffer.
        site: The op that writes it.
        moved: Number of elements that change in FP32.
        stalled: Number of these that do not change in 16 bits.
        counts: Whether the buffer holds whole numbers before and after.
        example: Value of the first element that stalls.
    """

    name: str
    site: SiteId
    moved: int
    stalled: int
    counts: bool
    example: float


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


_ARITHMETIC = frozenset(
    """
    add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_ copy_ batch_norm instance_norm _native_batch_norm_legit
    """.split()
)


def _writer(executor: LockStep, buffer: fx.Node) -> SiteId | None:
    """Return the last op that computes a new value for a buffer, or for a view of it."""
    aliases, writer = {buffer}, None
    for step in executor.program.steps:
        targets = [step.node.args[p] for p in step.mutates if p < len(step.node.args)]
        if step.site is not None and any(node in aliases for node in targets):
            aliases.add(step.node)
            op = overload_of(step.target)
            writer = step.site.id if op is not None and base_name(op) in _ARITHMETIC else None
        elif not step.makes_values and aliases.intersection(step.node.all_input_nodes):
            aliases.add(step.node)
    return writer


@dataclass(slots=True)
class OutputDifference:
    """One output against the FP32 model, summed over the batches that differ.

    Attributes:
        name: Name of the output.
        problem: Why it cannot be compared, if it cannot.
        integers: Whether it holds integers; sums of squares are then counts of (differing) elements.
        ref_sq: Sum of squares of the FP32 model's output.
        err_sq: Sum of squares of the 16-bit run's error.
        code_err_sq: Sum of squares of the error of the same code in FP32, the effect of the code alone.
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
        batches: Number of batches run and compared.
        failure: Why a batch could not be run.
        untraced: Whether the FP32 model could not be traced, so that the traces could not be compared.
        reads: Lines that read a precision in the trace that differs.
        place: The first difference between the traces.
        outputs: Differences of the outputs by name; empty where 16 bits run the code of FP32.
    """

    batches: int = 0
    failure: str | None = None
    untraced: bool = False
    reads: tuple[SourceLine, ...] = ()
    place: CodeDifference | None = None
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
    """A site that breaks by its own fault, with intact inputs.

    Attributes:
        site: The site that breaks.
        batch: Number of the first batch in which it breaks, from 0.
        poisons: Sites that become inf or NaN because of it if nothing is repaired, in graph order.
        fate: Whether inf or NaN reaches an output of the model, or is lost on the way.
        hidden_at: Sites that read its inf or NaN and return finite values, in graph order.
        hidden_sqnr_db: The worst accuracy at those sites; ``None`` if exact.
        buffer: Name of the buffer that it leaves inf or NaN, if any.
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
        """Whether values remain wrong because of it, rather than become finite and accurate again."""
        right = self.hidden_sqnr_db is None or self.hidden_sqnr_db >= RIGHT_DB
        return not (self.fate == "recovered" and right)


@dataclass(frozen=True, slots=True)
class StateFault:
    """A fault of the function that computes a step's inputs from the outputs of the previous step.

    Attributes:
        name: The input that is not finite in 16 bits only.
        op: The first op that breaks; empty if unknown.
        line: Its line in the function's code.
        peak: Largest FP32 magnitude among the broken elements.
        broken: Number of broken elements.
        nan: Number of them that are NaN.
        elements: Number of elements of the input.
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
        batch: Number of the batch, from 0.
        step: Number of the step, from 1.
        errors: Sums of squared errors and of FP32's squares after repairs, by output.
        headroom_bits: Least headroom of the step's 16-bit values; negative if one overflows.
        headroom_at: The site, or input, with the least headroom.
        origins: Sites that break by their own fault.
        faults: Faults of the function that computes the next inputs.
        flipped: Next inputs, such as the chosen token, that would differ in the 16-bit run.
        poisoned: Whether an earlier step's fault reaches an output if nothing is repaired.
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
        batches: Number of batches run.
        names: Names of the batches that have one, by number.
        observations: Measurements by site; views share their source's.
        origins: Independent origins, in graph order.
        masks: Sites whose -inf is a saturated attention mask that a later softmax turns into zeros.
        by_design: Sites near the limit because they read a mask, harmless or not.
        gaps: Parts that the run did not examine, one per site and kind.
        chosen: Indices selected in stacks of matrices, such as experts, by name of the stack.
        twins: Reason why the twin of an op was not checked, by op; empty if it agrees with the kernel.
        seconds: Wall time per phase.
        gradients: Record of the backward pass, if any.
        sensitivity: Record of the probes, if any.
        outputs: Comparison of each output, without repairs, in its worst batch.
        edited: Comparison of edited code in FP32 with the user's FP32 model, by output; empty without edits.
        decisions: Choices of ops that turn floats into integers, booleans or whole numbers, by site.
        buffers: Updates of buffers that stall, by name.
        culprits: Ops at which the errors of inaccurate outputs enter.
        code: Differences between the model's code in 16 bits and in FP32.
        path: Values that the model's code reads, if it was traced along the path of its inputs.
        steps: Observations of each step; empty without ``--steps``.
        traces: Number of times the model was traced.
        comparison: Comparison with the reference model of ``--against``.
        fed_back: Description of the function that computes the inputs of a step.
        given: Peaks of the batches' tensors, by graph number and placeholder, for measured rules.
    """

    # parts of an audit are sent as JSON, except the comparison with a reference model, which holds tensors
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
            *(self.device, self.backend),
            observations=peaks,
            masks=self.masks,
            by_design=self.by_design,
            given=self.given,
        )

    def join(self, later: RunRecord) -> None:
        """Add the record of later batches.

        Records are joined in the order of their batches, so that the result, including the rounding of its
        sums, does not depend on which machine ran which batch.
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
                self.gradients = later.gradients.empty_copy()
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
        worst, other = self.comparison, later.comparison
        if worst is None or (other is not None and other.wrong and not worst.wrong):
            self.comparison = other
        self.fed_back = self.fed_back or later.fed_back
        for graph, peaks in later.given.items():
            mine = self.given.setdefault(graph, {})
            mine.update({name: max(mine.get(name, 0.0), peak) for name, peak in peaks.items()})

    def _join_sites(self, later: RunRecord) -> None:
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
