"""The document of training runs: losses, scales, and the health of gradients, updates and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.findings.finding import FailOn, Finding, Gate, Verdict
from ampaudit.report.card import CardRows, Displayable, counted
from ampaudit.report.model import Environment, ModelInfo, ToolInfo


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a loop.

    Attributes:
        step: Number of the step, from 0.
        loss: Unscaled loss; null if it is not finite or not recorded.
        skipped: Whether the scaler skipped the optimizer's step.
        recorded: Whether the loop recorded a loss.
    """

    step: int
    loss: float | None
    scale: float
    skipped: bool
    recorded: bool = True

    @property
    def broken(self) -> bool:
        """Whether a loss was recorded that is not finite."""
        return self.recorded and self.loss is None


@dataclass(frozen=True, slots=True)
class ParameterHealth:
    """The health of a parameter; shares are means over the watched steps.

    Attributes:
        gradient_peaks: Largest gradient magnitude of each watched step without the scale; null if not finite.
        zero: Share of gradient elements that are zero.
        flushed: Share of the others that 16 bits would flush to zero under the scale of the step.
        broken: Number of watched steps in which the gradient was inf or NaN.
        update_ratio: Median over steps of the norm of the update over that of the weights; null without one.
        lost: Share of sampled elements whose update a 16-bit weight would lose: it is less than half an ulp.
        state_flushed: Share of the sampled second moments of the optimizer that 16 bits would flush to zero.
        storage: Dtype in which it is stored.
    """

    name: str
    elements: int
    gradient_peaks: tuple[float | None, ...]
    zero: float
    flushed: float
    broken: int
    update_ratio: float | None
    lost: float | None
    state_flushed: float | None
    storage: str = "float32"

    @property
    def largest_gradient(self) -> float | None:
        """The largest peak that is finite."""
        return max((peak for peak in self.gradient_peaks if peak is not None), default=None)


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a watched loop.

    Attributes:
        dtype: The 16-bit format that it is judged by.
        every: Interval of the watched steps.
        watched: Numbers of the watched steps.
        parameters: Parameters in the optimizer's order.
        eps: The optimizer's eps; null if it has none.
        eps_held: eps rounded to 16 bits; 0 if it underflows.
        storage: Dtype in which most elements of the parameters are stored.
        may_flush: Whether the loop computes in a format in which gradients become zero that are not in FP32.
        dropped: Number of losses on which the loop took no step; they are not in ``steps``.
        broken_state: Buffers in which forward passes left inf or NaN, with the measured step from which on;
            ``None`` if that is after the last one.
    """

    dtype: str
    every: int
    watched: tuple[int, ...]
    steps: tuple[StepRecord, ...]
    parameters: tuple[ParameterHealth, ...]
    eps: float | None
    eps_held: float | None
    storage: str
    may_flush: bool = True
    dropped: int = 0
    broken_state: tuple[tuple[str, int | None], ...] = ()

    @property
    def recorded(self) -> tuple[StepRecord, ...]:
        """The steps with a loss."""
        return tuple(step for step in self.steps if step.recorded)

    @property
    def scaled(self) -> bool:
        """Whether a loss scale was in use."""
        return any(step.scale != 1.0 for step in self.steps)

    @property
    def skipped(self) -> int:
        """The number of skipped steps."""
        return sum(step.skipped for step in self.steps)


@dataclass(frozen=True, slots=True)
class Variant:
    """One of several training runs side by side.

    Attributes:
        name: ``fp32``, ``torch.amp`` or the name of the policy.
        diverged: Step from which the loss stays away from FP32's; null if it does not diverge.
        final_loss: Mean loss over the last tenth of the steps; null if not finite, or not measured.
        metric: Mean of the model file's metric after training; null without one.
        seconds: Median time of a step; null if not measured.
        bytes_held: Bytes of parameters, gradients and optimizer state; null if not measured.
        peak_bytes: Peak bytes allocated on a GPU.
    """

    name: str
    how: str
    health: Health
    diverged: int | None
    final_loss: float | None
    metric: float | None
    seconds: float | None
    bytes_held: int | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, repr=False)
class TrainingReport(Displayable):
    """Training runs with the same start and batches (``ampaudit train``), or a watched loop.

    Attributes:
        seed: Seed of the runs; null for a watched loop.
        optimizer: Class of the optimizer.
    """

    schema: Literal[1]
    tool: ToolInfo
    model: ModelInfo
    device: str
    dtype: str
    steps: int
    seed: int | None
    optimizer: str
    verdict: Verdict
    gate: Gate
    fail_on: FailOn
    findings: tuple[Finding, ...]
    variants: tuple[Variant, ...]
    notes: tuple[str, ...]
    environment: Environment
    kind: Literal["training"] = "training"

    @property
    def reference(self) -> Variant | None:
        """The FP32 run, if there was one."""
        return next((variant for variant in self.variants if variant.name == "fp32"), None)

    @property
    def exit_code(self) -> int:
        """0 if the gate passes, 1 for findings at or above ``fail_on`` in a run that is judged."""
        return 0 if self.gate == "pass" else 1

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        if self.reference is None:
            return f"{self.verdict.upper()} {self.model.source}: {counted(self.steps, 'watched step')}"
        runs = ", ".join(variant.name for variant in self.variants)
        return f"{self.verdict.upper()} {self.model.source}: {counted(self.steps, 'step')} in {runs}"

    def card_rows(self) -> CardRows:
        """Return the findings."""
        return [(f.severity, f.code, f.layer, f.cause) for f in self.findings if f.suppressed is None]
