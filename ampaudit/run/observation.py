"""The measurements of one site, merged over batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampaudit.core.decibels import signal_to_noise_db
from ampaudit.run.measure import FIELDS
from ampaudit.run.samples import SampleStatistics

__all__ = ["Observation"]

_MAXIMA = ("ref_peak", "peak", "bad_ref_peak", "inside_peak")
_JOINED_SEPARATELY = ("batch_peaks", "samples")


@dataclass(slots=True)
class Observation:
    """The measurements of one site, merged over batches (maxima, minima, sums).

    Peaks, counts and errors cover all elements, ``samples`` only the sampled ones. ``inside_peak`` is the
    largest square inside a norm, ``batch_peaks`` the FP32 peak of each batch (or call) by its number.
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
    batch_peaks: dict[int, float] = field(default_factory=dict)
    samples: SampleStatistics = field(default_factory=SampleStatistics)

    @property
    def peak_batch(self) -> int:
        """The number of the batch with the largest peak."""
        return max(self.batch_peaks, key=lambda number: self.batch_peaks[number], default=0)

    def merge(self, fields: dict[str, float], elements: int, number: int = 0) -> None:
        """Add one batch's measured fields."""
        self.elements += elements
        self.batches += 1
        self.batch_peaks[number] = max(self.batch_peaks.get(number, 0.0), fields["ref_peak"])
        for name, value in fields.items():
            old = getattr(self, name)
            setattr(self, name, max(old, value) if name in _MAXIMA else old + value)

    def join(self, later: Observation) -> None:
        """Add the measurements of later batches."""
        for name in self.__dataclass_fields__:
            if name not in _JOINED_SEPARATELY:
                old, new = getattr(self, name), getattr(later, name)
                setattr(self, name, max(old, new) if name in _MAXIMA else old + new)
        for number, peak in later.batch_peaks.items():
            self.batch_peaks[number] = max(self.batch_peaks.get(number, 0.0), peak)
        self.samples.add(later.samples)

    @property
    def bad(self) -> int:
        """Count elements that are inf or NaN in 16 bits but not in FP32."""
        return int(self.pos_inf + self.neg_inf + self.nan)

    @property
    def finite_peak(self) -> float:
        """The larger of both runs' finite peaks."""
        return max(self.ref_peak, self.peak)

    @property
    def sqnr_db(self) -> float | None:
        """Accumulated signal-to-noise ratio, 10 log10(sum ref^2 / sum err^2); ``None`` without error."""
        return signal_to_noise_db(self.ref_sq, self.err_sq)

    @property
    def local_sqnr_db(self) -> float | None:
        """The same for this op alone, computed on the reference's inputs rounded to 16 bits."""
        return signal_to_noise_db(self.local_ref_sq, self.local_err_sq)


assert set(FIELDS) <= set(Observation.__dataclass_fields__), "an observation holds every measured field"
