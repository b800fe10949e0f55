"""Signal-to-noise ratios in decibels, from sums of squares; and what stands for one of integers."""

from __future__ import annotations

import math

__all__ = ["differing_share", "ratio_db", "share_db", "signal_to_noise_db"]


def signal_to_noise_db(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise); ``None`` without noise, or where that is not finite."""
    found = ratio_db(signal, noise)
    return found if math.isfinite(found) else None


def ratio_db(signal: float, noise: float) -> float:
    """The same ratio; inf without noise, -inf without signal or with noise that is not finite."""
    if noise == 0.0:
        return math.inf
    ratio = signal / noise if math.isfinite(noise) else 0.0
    if ratio == 0.0:
        return -math.inf
    return 10.0 * math.log10(ratio) if math.isfinite(ratio) else math.inf


def share_db(share: float) -> float | None:
    """20 log10(1 / share) of integers that differ; ``None`` if none does.

    20 dB, a tenth of the amplitude for floats, is a tenth of the elements.
    """
    return -20.0 * math.log10(share) if share else None


def differing_share(db: float) -> float:
    """The share of integers that differ, of an accuracy that ``share_db`` gives."""
    return math.pow(10.0, -db / 20.0)
