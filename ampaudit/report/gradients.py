"""Results about gradients, by site and parameter, and about the loss scale."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampaudit.report.scales import ScaleAdvice

__all__ = ["BackwardReport", "Gradient", "LossValues", "ParameterGradient"]


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient; peak, headroom and counts include the loss scale, exponents do not.

    Attributes:
        precision: ``16 bits`` or ``float32``: how it is held.
        peak: largest magnitude.
        headroom_bits: log2(max of the run's format / peak).
        inf: elements infinite in 16 bits only.
        nan: elements NaN in 16 bits only.
        elements: elements looked at: all of them.
        flushed: share of those that are not zero in FP32 that is zero in 16 bits.
        sqnr_db: signal-to-noise ratio against FP32.
        exponents: count of FP32's magnitudes g per e with 2^e < g <= 2^(e+1), without the loss scale.
        cancelled: whether it is a sum that cancels in FP32, so that rounding errors are what is left.
    """

    precision: str
    peak: float
    headroom_bits: float | None
    inf: int
    nan: int
    elements: int
    flushed: float
    sqnr_db: float | None
    exponents: dict[int, int] = field(repr=False)
    cancelled: bool

    @property
    def low_precision(self) -> bool:
        """Whether it is held in 16 bits."""
        return self.precision == "16 bits"


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """The gradient of a parameter, in the dtype in which it is stored."""

    name: str
    gradient: Gradient


@dataclass(frozen=True, slots=True)
class LossValues:
    """The unscaled loss of one batch; null if not finite.

    Attributes:
        float32: in FP32.
        lower: in 16 bits, as training would see it.
        repaired: in 16 bits with the faults of the forward pass repaired, where that differs; the gradients
            are those of this loss.
    """

    float32: float | None
    lower: float | None
    repaired: float | None = None


@dataclass(frozen=True, slots=True)
class BackwardReport:
    """Results of the backward pass.

    Attributes:
        loss_scale: what the loss was multiplied by.
        dynamic: whether training lowers it when something overflows.
        scale_from: who says so.
        losses: per batch.
        advice: the scales that suit; null where no gradient is held in 16 bits.
        suggested: exponent of the scale to use; null where none suits, or the format needs none.
        parameters: their gradients.
        frozen: parameters that ask for no gradient.
        unused: parameters that ask for one, and that no batch's loss depends on.
        notes: what was not as in training.
    """

    loss_scale: float
    dynamic: bool
    scale_from: str
    losses: tuple[LossValues, ...] = field(repr=False)
    advice: ScaleAdvice | None = field(repr=False)
    suggested: int | None
    parameters: tuple[ParameterGradient, ...] = field(repr=False)
    frozen: tuple[str, ...] = field(repr=False)
    unused: tuple[str, ...] = field(repr=False)
    notes: tuple[str, ...]
