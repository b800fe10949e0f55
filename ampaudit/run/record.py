"""Records a run: one observation per site, the origins, and the sites that each would have poisoned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, PlainSerializer

from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.report.gap import Gap
from ampaudit.run.against.comparison import ModelComparison
from ampaudit.run.attribution import Culprit
from ampaudit.run.backward.record import GradientRecord
from ampaudit.run.buffers import BufferUpdate
from ampaudit.run.code_record import CodeRecord
from ampaudit.run.decisions import DecisionStats
from ampaudit.run.observation import Observation
from ampaudit.run.outputs import OutputComparison, merge_outputs
from ampaudit.run.path_record import PathRecord
from ampaudit.run.sensitivity.record import SensitivityRecord

__all__ = ["Fate", "Origin", "RunRecord", "StateFault", "StepObservation"]

RIGHT_DB = 20.0  # a value that was inf on its way and comes out this accurate was not harmed
Fate = Literal["reaches the output", "recovered"]
# the same file each time
_Sites = Annotated[set[SiteId], PlainSerializer(sorted, return_type=list[SiteId])]
_Numbers = Annotated[set[int], PlainSerializer(sorted, return_type=list[int])]


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
