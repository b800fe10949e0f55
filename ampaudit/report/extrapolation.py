"""Results beyond the audited batches: proofs, searches, tail estimates, sweeps, other contracts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from ampaudit.core.assumptions import Assumption
from ampaudit.core.sites import SiteId

Size = Annotated[int, Ge(1), Le(1 << 62)]
AxisName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,59}$")]


@dataclass(frozen=True, slots=True)
class StressResult:
    """The search result of one site (``--stress``).

    Attributes:
        site: Name of the site.
        seen: FP32 peak on the given batches.
        reached: Largest FP32 peak over all inputs that the search tried.
        overflows: Whether the input with that peak overflows in a run.
        file: Path of that input, for ``--inputs``; ``None`` if it was not saved.
    """

    site: SiteId
    seen: float
    reached: float
    overflows: bool
    file: str | None


@dataclass(frozen=True, slots=True)
class Tail:
    """Expected overflows of a site beyond the data (``run/extreme_value.py``), with a 90 % interval."""

    site: SiteId
    per_million: float
    low: float
    high: float
    batches: int
    samples: int


@dataclass(frozen=True, slots=True)
class VerdictChange:
    """A site with another gravest finding under another execution contract (``--contract``)."""

    site: SiteId
    usual: str
    here: str


@dataclass(frozen=True, slots=True)
class Proofs:
    """The assumptions of the proofs, and their count.

    Attributes:
        assumed: Range of each input, as stated, or from the rows of an embedding table or the batches.
        proved: Number of sites that cannot overflow by their own fault.
        sites: Number of sites that the proofs cover.
        uncovered_ops: Ops without a transfer function, whose outputs are unbounded.
        contract: Assumptions about kernels.
    """

    assumed: tuple[Assumption, ...]
    proved: int
    sites: int
    uncovered_ops: tuple[str, ...]
    contract: str


@dataclass(frozen=True, slots=True)
class SizeResult:
    """The result at one size of the inputs (``--sweep``).

    Attributes:
        value: The size.
        verdict: ``not run`` if the model or its inputs fail at this size.
        errors: Number of errors.
        warnings: Number of warnings.
        breaks: Sites with errors.
        headroom_bits: Least headroom of 16-bit values in bits; null if nothing was measured.
        nearest: Site with the least headroom.
        output: Accuracy of the least accurate output: ``63 dB``, ``exact``, ``broken`` or ``constant``.
        problem: Reason why it was not run.
    """

    value: Size
    verdict: Literal["pass", "fail", "not run"]
    errors: int = 0
    warnings: int = 0
    breaks: tuple[SiteId, ...] = ()
    headroom_bits: float | None = None
    nearest: SiteId | None = None
    output: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SizeGrowth:
    """The size at which a site would overflow, by a fit to its FP32 peaks (``run/extreme_value.py``).

    Attributes:
        site: The site.
        form: Form of the fit: ``power``, ``linear`` or ``logarithmic``.
        exponent: Exponent of the size, if the form is ``power``.
        peaks: FP32 peak at each size that was run; null where the site does not exist.
        r_squared: R squared of the fit to the logarithms of the peaks.
        residual_bits: Root mean square of the residuals in bits.
        crossing: Size at which the fit passes the largest value of the format.
        low: Least such size in the 90 % prediction intervals of the fits that are as good.
        high: Largest such size; null if there is none.
        extrapolated: Whether the size lies beyond those that were run.
        promoted: Whether the policy keeps the site in float32 at that size, by a rule about measured values.
    """

    site: SiteId
    form: Literal["power", "linear", "logarithmic"]
    exponent: float | None
    peaks: tuple[float | None, ...]
    r_squared: float
    residual_bits: float
    crossing: Size
    low: int
    high: int | None
    extrapolated: bool
    promoted: bool = False


@dataclass(frozen=True, slots=True)
class Sweep:
    """A scan at several sizes of the inputs.

    Attributes:
        axis: Name of the dimension, such as ``length``.
        values: Results by size, in order.
        shown: The worst size, which the findings, sites and outputs of the report are about.
        growth: Sites that overflow within or beyond these sizes, smallest size first.
    """

    axis: AxisName
    values: tuple[SizeResult, ...]
    shown: int
    growth: tuple[SizeGrowth, ...] = ()

    @property
    def soonest(self) -> SizeGrowth | None:
        """The site that would overflow first beyond the sizes that were run."""
        return next((growth for growth in self.growth if growth.extrapolated and not growth.promoted), None)
