"""Results about gradients, by site and parameter, and about the loss scale."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerScales:
    """The scales that suit one layer, as exponents of two; ``None`` if none does.

    Attributes:
        layer: Module path of the layer.
        low: Smallest exponent at which no more than the stated share is flushed.
        high: Largest exponent at which nothing overflows.
        high_at: The gradient that overflows first.
        elements: Number of gradient elements that are not zero in FP32.
        flushed: Share of these that is flushed at the scale of the run.
        peak: Largest gradient without the scale.
    """

    layer: str
    low: int
    high: int
    high_at: str
    elements: int
    flushed: float
    peak: float


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One scale, 2 ** ``exponent``: the flushed share over all layers, and the overflowing gradients."""

    exponent: int
    flushed: float
    overflowing: int


@dataclass(frozen=True, slots=True)
class ScaleAdvice:
    """The suitable loss scales according to one run.

    Attributes:
        share: Share of a layer's gradient that may be flushed.
        layers: Scales by layer, in graph order.
        rows: Table of the scales from 2^0 to 2^24.
        low: Smallest exponent that suits every layer.
        high: Largest exponent that suits every layer.
        low_at: Layer that sets ``low``.
        high_at: Layer that sets ``high``.
    """

    share: float
    layers: tuple[LayerScales, ...] = field(repr=False)
    rows: tuple[ScaleRow, ...] = field(repr=False)
    low: int
    high: int
    low_at: str
    high_at: str

    @property
    def exists(self) -> bool:
        """Whether one scale suits all layers."""
        return self.low <= self.high

    @property
    def suggested(self) -> int | None:
        """The exponent to use: one below the upper end, or the lower end or 0 if that is higher."""
        return max(self.low, self.high - 1, 0) if self.exists and self.high >= 0 else None


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient; peak, headroom and counts include the loss scale, exponents do not.

    Attributes:
        precision: ``16 bits`` or ``float32``, in which it is stored.
        peak: Largest magnitude.
        headroom_bits: log2(max of the run's format / peak).
        inf: Number of elements that are infinite in 16 bits only.
        nan: Number of elements that are NaN in 16 bits only.
        elements: Number of elements measured, which are all elements.
        flushed: Share of the elements that are not zero in FP32 that is zero in 16 bits.
        sqnr_db: Signal-to-noise ratio against FP32 in dB.
        exponents: Number of FP32 magnitudes g by exponent e, 2^e < g <= 2^(e+1), without the loss scale.
        cancelled: Whether it is a sum that cancels in FP32, so that only rounding errors remain.
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
        float32: Loss in FP32.
        lower: Loss in 16 bits, as in training.
        repaired: Loss in 16 bits with the faults of the forward pass repaired, if that differs; the gradients
            belong to this loss.
    """

    float32: float | None
    lower: float | None
    repaired: float | None = None


@dataclass(frozen=True, slots=True)
class BackwardReport:
    """Results of the backward pass.

    Attributes:
        loss_scale: Factor of the loss.
        dynamic: Whether training lowers the scale after an overflow.
        scale_from: Source of the scale.
        losses: Losses by batch.
        advice: Suitable scales; null if no gradient is held in 16 bits.
        suggested: Exponent of the suggested scale; null if none from 1 on suits, or the format needs none.
        parameters: Gradients of the parameters.
        frozen: Parameters that do not require a gradient.
        unused: Parameters that require a gradient but do not affect the loss of any batch.
        notes: Deviations from real training.
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
