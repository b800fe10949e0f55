"""The ranking of roundings by the error that each makes in the outputs (``scan --sensitivity``, ``tune``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.finding import Source

__all__ = ["Noise", "NoiseKind", "Sensitivity"]

NoiseKind = Literal["op", "weight", "cast", "gradient", "jump"]


@dataclass(frozen=True, slots=True)
class Noise:
    """The error that one rounding makes in the outputs, or in the gradients of the parameters.

    Attributes:
        name: the site's id, or the name of a weight or input.
        kind: ``op``, ``weight``, ``cast`` for the casts of what an op reads, ``gradient`` for what its
            backward computes, or ``jump`` for values that rounding carries over an edge of its derivative.
        db: accuracy that the outputs or gradients would have if nothing else were rounded, in the batch and
            output that suffer most; null if that were exact.
        share: of their error.
        layer: module path of an op.
        op: the ATen op.
        source: line of the model's code.
    """

    name: str
    kind: NoiseKind
    db: float | None
    share: float
    layer: str = ""
    op: str = ""
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Which roundings make the error, and whether they add up to it.

    Attributes:
        dtype: the 16-bit format.
        rows: the ranking, worst first.
        predicted_db: accuracy of the worst output that the rows add up to; null if exact.
        measured_db: the same as measured; null if exact, or broken.
        broken: whether an output is inf or NaN.
        probes: backward passes that were needed.
    """

    dtype: str
    rows: tuple[Noise, ...]
    predicted_db: float | None
    measured_db: float | None
    probes: int
    broken: bool = False
    of: Literal["outputs", "gradients"] = "outputs"
