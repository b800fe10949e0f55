"""What a run saw, as values: one observation per site, the origins, and what each would have poisoned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ampaudit.run.measure import FIELDS
from ampaudit.run.samples import SampleStatistics
from ampaudit.sites import SiteId

__all__ = ["Fate", "Observation", "Origin", "RunRecord", "decibel"]

Fate = Literal["reaches the output", "recovered"]

_MAXIMA = ("ref_peak", "peak", "bad_ref_peak")


@dataclass(slots=True)
class Observation:
    """Everything measured at one site, merged over batches (maxima, minima, sums).

    Peaks, counts and errors are over all elements; what ``samples`` holds is over the sampled ones.
    ``inside_peak`` is the largest square inside a norm, ``batch_peaks`` the FP32 peak of each batch.
    """

    elements: int = 0
    batches: int = 0
    ref_peak: float = 0.0
    peak: float = 0.0
    pos_inf: float = 0.0
    neg_inf: float = 0.0
    nan: float = 0.0
    err_sq: float = 0.0
    ref_sq: float = 0.0
    bad_ref_peak: float = 0.0
    ref_bad: float = 0.0
    local_err_sq: float = 0.0
    local_ref_sq: float = 0.0
    local_elements: int = 0
    inside_peak: float = 0.0
    batch_peaks: list[float] = field(default_factory=list)
    samples: SampleStatistics = field(default_factory=SampleStatistics)

    def merge(self, fields: dict[str, float], elements: int) -> None:
        """Add one batch's measured fields."""
        self.elements += elements
        self.batches += 1
        self.batch_peaks.append(fields["ref_peak"])
        for name, number in fields.items():
            old = getattr(self, name)
            setattr(self, name, max(old, number) if name in _MAXIMA else old + number)

    @property
    def bad(self) -> int:
        """Elements that are inf or NaN in 16 bits and not in FP32."""
        return int(self.pos_inf + self.neg_inf + self.nan)

    @property
    def finite_peak(self) -> float:
        """The larger of the two runs' finite peaks."""
        return max(self.ref_peak, self.peak)

    @property
    def sqnr_db(self) -> float | None:
        """Accumulated signal to error ratio, 10 log10(sum ref^2 / sum err^2); None without error."""
        return decibel(self.ref_sq, self.err_sq)

    @property
    def local_sqnr_db(self) -> float | None:
        """The same for this op alone, fed with the reference's inputs rounded to 16 bits."""
        return decibel(self.local_ref_sq, self.local_err_sq)


@dataclass(frozen=True, slots=True)
class Origin:
    """A site that went wrong by itself: its inputs were in order and its output was not.

    Attributes:
        site: where.
        batch: number of the first batch in which it happened, from 0.
        poisons: sites that become inf or NaN because of it when nothing is repaired, in graph order.
        fate: whether an output of the model is inf or NaN because of it, or all is finite again before.
        hidden_at: sites that take in inf or NaN from it and give finite values, in graph order.
        hidden_sqnr_db: the worst accuracy at those; ``None`` where they are exact.
    """

    site: SiteId
    batch: int
    poisons: tuple[SiteId, ...]
    fate: Fate = "reaches the output"
    hidden_at: tuple[SiteId, ...] = ()
    hidden_sqnr_db: float | None = None


@dataclass(slots=True)
class RunRecord:
    """One audit run.

    Attributes:
        device: ``cpu`` or ``cuda``.
        backend: ``emulated`` or ``native``.
        batches: batches run.
        observations: by site id; views share their source's values and have none of their own.
        origins: independent origins, in graph order.
        masks: sites whose -inf is a saturated attention mask that a later softmax turns into zeros.
        by_design: sites near the limit because they take in a mask, harmless or not.
        uncovered: op names that could not be observed, with the reason.
        seconds: wall time per phase.
    """

    device: str
    backend: str
    batches: int = 0
    observations: dict[SiteId, Observation] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)
    masks: set[SiteId] = field(default_factory=set)
    by_design: set[SiteId] = field(default_factory=set)
    uncovered: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def observation(self, site: SiteId) -> Observation:
        """The observation of a site, made if there is none."""
        return self.observations.setdefault(site, Observation())


def decibel(signal: float, error: float) -> float | None:
    """10 log10(signal / error); ``None`` without error, or without signal."""
    if error == 0.0 or signal == 0.0 or not math.isfinite(signal / error):
        return None
    return 10.0 * math.log10(signal / error)


assert set(FIELDS) <= set(Observation.__dataclass_fields__), "an observation holds every measured field"
