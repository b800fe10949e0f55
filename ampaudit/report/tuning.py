"""The document of ``tune``: what must stay in float32 for the accuracy that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.card import CardRows, Shown, counted
from ampaudit.report.finding import Source
from ampaudit.report.inputs import InputsInfo
from ampaudit.report.model import Environment, ModelInfo, ToolInfo
from ampaudit.report.sensitivity import Noise

__all__ = ["FrontierPoint", "KeptOp", "KeptWeight", "TriedSet", "TuningReport"]

Why = Literal["range", "accuracy", "decision"]


@dataclass(frozen=True, slots=True)
class KeptOp:
    """An op that stays in float32.

    Attributes:
        site: its id.
        layer: its module path.
        op: the ATen op.
        why: its value leaves the 16-bit range; accuracy needs it; or it flips a decision.
        text: the same in words, with the number that says so.
        without_db: predicted accuracy with this op in 16 bits after all; null for one that is out of range.
        measured_without_db: the same as measured (``--exhaustive``); null if it was not, or is broken.
        source: line of the model's code.
        broken_without: whether an output was inf or NaN without it (``--exhaustive``).
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
        name: its path.
        bytes: that this costs, beyond 16 bits.
        why: it leaves the 16-bit range, or accuracy needs it.
        without_db: predicted accuracy with this weight in 16 bits; null for one that is out of range.
    """

    name: str
    bytes: int
    why: Why
    without_db: float | None = None


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A choice that no other beats in both accuracy and cost, under the model of errors.

    Attributes:
        ops: ops in float32.
        share: of all ops that could be in 16 bits.
        casts: values that are cast, each perhaps for several readers.
        cost: of what is in float32, and of the casts: in ops, bytes or seconds, as ``cost_kind`` says.
        predicted_db: accuracy of the worst output; null if exact.
        measured_db: the same, where it was run; null elsewhere, and if it is broken.
        policy: its rule file (YAML).
        chosen: whether it is the report's choice.
        weights: stored in float32.
        broken: whether it was run and left inf or NaN in an output.
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
        what: in words.
        ops: ops in float32.
        predicted_db: accuracy of the worst output; null if exact.
        measured_db: the same as measured; null if exact, or broken.
        broken: whether an output is inf or NaN.
        reached: whether it has the accuracy that was asked for.
        metric: the model's metric with it; null without ``--metric-drop``.
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
class TuningReport(Shown):
    """The fewest float32 ops for an accuracy.

    Attributes:
        target_db: the accuracy that was asked for, of every output; null with ``--metric-drop``.
        metric_drop: the loss of the model's metric that was allowed; null with ``--min-sqnr``.
        metric: the metric in FP32 and with the policy; null without one.
        cost_kind: what was minimised.
        reached: whether the policy has the accuracy that was asked for.
        low_db: accuracy with everything in 16 bits; null if exact, or broken.
        low_broken: whether that leaves inf or NaN in an output.
        low_predicted_db: the accuracy that was predicted for it.
        predicted_db: accuracy that was predicted for the policy; null if exact.
        measured_db: accuracy of the policy, run as a whole; null if exact, or broken.
        ops: ops that may be in 16 bits or in float32.
        kept: those that stay in float32, in graph order.
        lower_bound: least number of ops that must stay in float32 under the model of errors.
        minimal: whether each kept op was shown to be needed, but for those out of range (``--exhaustive``).
        casts: that the policy inserts, per forward pass.
        weights: that are stored in float32.
        bytes_before: of all weights, as the model has them.
        bytes_after: as the policy stores them.
        noise: the values whose rounding hurts most with everything in 16 bits, worst first.
        frontier: from everything in 16 bits to the most accurate choice.
        tried: the choices that were run, in order.
        runs: forward passes in 16 bits, and probes.
        policy: the rule file (YAML).
        name: of that policy.
        rescale: a change of weights by powers of two that makes some of it unnecessary; may be empty.
        seconds: wall time by phase.
        broken: whether the policy leaves inf or NaN in an output.
        code: PyTorch code that casts the model and keeps whole layers in float32, and was found to have the
            accuracy; empty if none was.
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
