"""The document of ``tune``: the ops that must stay in float32 for a required accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.findings.finding import Source
from ampaudit.report.card import CardRows, Displayable, counted
from ampaudit.report.model import Environment, InputsInfo, ModelInfo, ToolInfo

NoiseKind = Literal["op", "weight", "cast", "gradient", "jump"]
Why = Literal["range", "accuracy", "decision"]


@dataclass(frozen=True, slots=True)
class Noise:
    """The error that one rounding adds to the outputs, or to the gradients of the parameters.

    Attributes:
        name: Id of a site, or name of a weight or an input.
        kind: ``op``, ``weight``, ``cast`` for the casts of an op's inputs, ``gradient`` for the backward of
            an op, or ``jump`` for values that rounding moves across an edge of the op's derivative.
        db: Accuracy in dB if nothing else were rounded, in the batch and output with the largest error;
            ``None`` if exact.
        share: Share of the whole error there, from 0 to 1.
        layer: Module path of the op.
        op: Name of the ATen op.
        source: Line of the model's code.
    """

    name: str
    kind: NoiseKind
    db: float | None
    share: float
    layer: str = ""
    op: str = ""
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class KeptOp:
    """An op that stays in float32.

    Attributes:
        why: ``range`` if its value leaves the 16-bit range, ``accuracy`` if accuracy needs it, or
            ``decision`` if it flips one.
        text: The same in words, with a number as evidence.
        without_db: Predicted accuracy in dB with this op in 16 bits; null for one that is out of range.
        measured_without_db: Measured accuracy of the same (``--exhaustive``); null if not measured, or if
            broken.
        broken_without: Whether an output was inf or NaN with this op in 16 bits (``--exhaustive``).
    """

    site: str
    layer: str
    op: str
    why: Why
    text: str
    without_db: float | None = None
    measured_without_db: float | None = None
    source: Source | None = None
    broken_without: bool = False


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight that is stored in float32.

    Attributes:
        name: Path of the weight.
        bytes: Additional size over 16 bits, in bytes.
        why: ``range`` if it leaves the 16-bit range, or ``accuracy`` if accuracy needs it.
        without_db: Predicted accuracy in dB with this weight in 16 bits; null for one that is out of range.
    """

    name: str
    bytes: int
    why: Why
    without_db: float | None = None


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A choice that no other beats in both accuracy and cost, by the error model.

    Attributes:
        ops: Number of ops in float32.
        share: Share of all ops that could be in 16 bits.
        casts: Number of cast values, each counted once.
        cost: Cost of the float32 ops and the casts, in ops, bytes or seconds according to ``cost_kind``.
        predicted_db: Predicted accuracy of the worst output; null if exact.
        measured_db: Measured accuracy; null if it was not run, or is broken.
        policy: Rule file (YAML).
        weights: Number of weights stored in float32.
        broken: Whether it was run and left inf or NaN in an output.
    """

    ops: int
    share: float
    casts: int
    cost: float
    predicted_db: float | None
    measured_db: float | None
    policy: str
    chosen: bool = False
    weights: int = 0
    broken: bool = False


@dataclass(frozen=True, slots=True)
class TriedSet:
    """A choice that was run.

    Attributes:
        step: ``start``, ``solve``, ``shrink``, ``exhaustive`` or ``final``.
        ops: Number of ops in float32.
        predicted_db: Predicted accuracy of the worst output; null if exact.
        measured_db: Measured accuracy; null if exact, or broken.
        broken: Whether an output contains inf or NaN.
        reached: Whether it has the required accuracy.
        metric: Metric of the model; null without ``--metric-drop``.
    """

    step: Literal["start", "solve", "shrink", "exhaustive", "final"]
    what: str
    ops: int
    predicted_db: float | None
    measured_db: float | None
    broken: bool
    reached: bool
    metric: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class TuningReport(Displayable):
    """The fewest float32 ops for an accuracy.

    Attributes:
        target_db: Required accuracy of every output; null with ``--metric-drop``.
        metric_drop: Allowed drop of the model's metric; null with ``--min-sqnr``.
        metric: Metric in FP32 and with the policy; null without one.
        cost_kind: Minimized cost.
        reached: Whether the policy has the required accuracy.
        low_db: Accuracy with everything in 16 bits; null if exact, or broken.
        low_broken: Whether everything in 16 bits leaves inf or NaN in an output.
        low_predicted_db: Predicted accuracy with everything in 16 bits.
        predicted_db: Predicted accuracy of the policy; null if exact.
        measured_db: Measured accuracy of the policy as a whole; null if exact, or broken.
        ops: Number of ops that may be in 16 bits or in float32.
        kept: Ops that stay in float32, in graph order.
        lower_bound: Least number of ops that must stay in float32, by the error model.
        minimal: Whether each kept op that is in range was shown to be necessary (``--exhaustive``).
        casts: Number of casts that the policy inserts per forward pass.
        weights: Weights that are stored in float32.
        bytes_before: Bytes of all weights in the model.
        bytes_after: Bytes of all weights as the policy stores them.
        noise: Values whose rounding costs the most accuracy with everything in 16 bits, worst first.
        frontier: Choices from everything in 16 bits to the most accurate one.
        tried: Choices that were run, in order.
        runs: Number of forward passes in 16 bits, and of probes.
        policy: Rule file (YAML).
        name: Name of the policy.
        rescale: Weights to rescale by powers of two, so that fewer ops stay in float32; may be empty.
        seconds: Wall time by phase.
        broken: Whether the policy leaves inf or NaN in an output.
        code: PyTorch code that casts the model, keeps whole layers in float32 and was verified to reach the
            accuracy; empty if there is none.
    """

    schema: Literal[1]
    tool: ToolInfo
    model: ModelInfo
    device: str
    dtype: str
    target_db: float | None
    metric_drop: float | None
    metric: tuple[float, float] | None
    cost_kind: Literal["ops", "bytes", "time"]
    reached: bool
    low_db: float | None
    low_broken: bool
    low_predicted_db: float | None
    predicted_db: float | None
    measured_db: float | None
    ops: int
    kept: tuple[KeptOp, ...]
    lower_bound: int
    minimal: bool
    casts: int
    weights: tuple[KeptWeight, ...]
    bytes_before: int
    bytes_after: int
    noise: tuple[Noise, ...]
    frontier: tuple[FrontierPoint, ...]
    tried: tuple[TriedSet, ...]
    runs: int
    policy: str
    name: str
    rescale: str
    seconds: dict[str, float]
    notes: tuple[str, ...]
    environment: Environment
    inputs: InputsInfo | None = None
    broken: bool = False
    code: str = ""
    kind: Literal["tuning"] = "tuning"

    @property
    def exit_code(self) -> int:
        """0 if the accuracy is reached, otherwise 1."""
        return 0 if self.reached else 1

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        word = "PASS" if self.reached else "FAIL"
        ops = f"{len(self.kept)} of {counted(self.ops, 'op')} in float32"
        return f"{word} {self.model.source} in {self.dtype}: {ops}"

    def card_rows(self) -> CardRows:
        """Return the ops that stay in float32."""
        return [(op.site, op.why, op.text) for op in self.kept]
