"""Results of one op: its precision, the rule behind it, and its measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ampaudit.core.sites import SiteId
from ampaudit.core.text import escape_control, format_number
from ampaudit.report.finding import Source
from ampaudit.report.gradients import Gradient

__all__ = ["Forward", "SiteReport", "WhatIf"]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A site's FP32 values compared with one number format.

    Attributes:
        headroom_bits: log2(format's max / peak), ``None`` where all values are zero.
        overflows: whether the peak rounds to infinity (or NaN) in that format.
        vanish: share of the sampled non-zero values that round to zero.
    """

    headroom_bits: float | None
    overflows: bool
    vanish: float


@dataclass(frozen=True, slots=True)
class Forward:
    """Measurements of a site.

    Attributes:
        peak: largest magnitude: FP32's, or the 16-bit run's where that was measured and is larger.
        headroom_bits: log2(max of the run's format / peak).
        inf: elements infinite in 16 bits only.
        nan: elements NaN in 16 bits only.
        elements: elements looked at for peak, inf and nan: all of them.
        sqnr_db: accumulated signal to quantization-noise ratio against FP32; null for a weight that fits.
            On a CPU, over every eighth block of 262,144 elements of what is larger than that.
        local_sqnr_db: the same for this op alone on exact inputs, over local_elements of its output.
        local_elements: see local_sqnr_db.
        sampled: elements looked at for the fields that follow.
        min_nonzero: smallest non-zero magnitude.
        flushed: share that is zero in 16 bits and not in FP32.
        subnormal: share that is subnormal in the run's format.
        max_error: largest absolute error.
        max_relative_error: largest relative error.
        exponents: count of FP32 values per floor(log2|x|).
        batch: name of the batch with the largest magnitude in FP32; null if it has none.
    """

    peak: float
    headroom_bits: float | None
    inf: int
    nan: int
    elements: int
    sqnr_db: float | None
    local_sqnr_db: float | None
    local_elements: int
    sampled: int
    min_nonzero: float | None
    flushed: float
    subnormal: float
    max_error: float
    max_relative_error: float
    exponents: dict[int, int] = field(repr=False)
    batch: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class SiteReport:
    """The results of one site.

    ``forward`` is null where it hands on the values of its input (role view or select). ``by_design``:
    it is near the limit because it takes in a mask, or is a value that no parameter has touched. ``bound``:
    no input of the proof's domain makes a larger magnitude here; null without a proof, or if unbounded.
    ``gradient`` is that of its output (``--backward``). ``inside`` is the largest square seen inside a norm
    that is given 16 bits, ``bound_inside`` a bound on it.
    """

    site: SiteId
    layer: str
    layer_type: str
    op: str
    role: str
    precision: str
    shape: tuple[int, ...]
    rule: str | None
    reason: str
    why: str
    source: Source | None
    verdict: Literal["proved", "observed", "overflows", "poisoned", "not observed"]
    by_design: bool
    forward: Forward | None
    gradient: Gradient | None = None
    bound: float | None = None
    bound_inside: float | None = None
    inside: float | None = None
    what_if: dict[str, WhatIf] | None = None

    def __repr__(self) -> str:
        peak = f", peak {format_number(self.forward.peak)}" if self.forward is not None else ""
        name = escape_control(self.site)
        return f"<{type(self).__name__} {name}: {self.precision}, {self.verdict}{peak}>"

    @property
    def headroom_bits(self) -> float | None:
        """Headroom of its values; ``None`` if not measured, or all values are zero."""
        return self.forward.headroom_bits if self.forward is not None else None

    @property
    def healthy(self) -> bool:
        """Whether it was measured, and neither overflows nor is poisoned."""
        return self.verdict in ("observed", "proved")
