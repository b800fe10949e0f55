"""Signal-to-noise ratios in decibels, and their counterpart for integers."""

from __future__ import annotations

import math

__all__ = ["differing_share", "ratio_db", "share_db", "signal_to_noise_db"]


def signal_to_noise_db(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal / noise) of two sums of squares; ``None`` if it is not finite."""
    db = ratio_db(signal, noise)
    return db if math.isfinite(db) else None


def ratio_db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise); inf without noise, -inf without signal or with non-finite noise."""
    if noise == 0.0:
        return math.inf
    ratio = signal / noise if math.isfinite(noise) else 0.0
    if ratio == 0.0:
        return -math.inf
    return 10.0 * math.log10(ratio) if math.isfinite(ratio) else math.inf


def share_db(share: float) -> float | None:
    """Return 20 log10(1 / share) for the share of integers that differ; ``None`` for 0.

    So 20 dB means a tenth of the elements, as it means a tenth of the amplitude for floats.
    """
    return -20.0 * math.log10(share) if share else None


def differing_share(db: float) -> float:
    """Return the share of differing integers for an accuracy in dB: the inverse of ``share_db``."""
    return math.pow(10.0, -db / 20.0)
