"""Defines what the rounding of one value does to the outputs (``scan --sensitivity``, ``tune``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.finding import Source

__all__ = ["Noise", "NoiseKind"]

NoiseKind = Literal["op", "weight", "cast", "gradient", "jump"]


@dataclass(frozen=True, slots=True)
class Noise:
    """The error that one rounding adds to the outputs, or to the gradients of the parameters.

    Attributes:
        name: Id of a site, or name of a weight or an input.
        kind: ``op``, ``weight``, ``cast`` for the casts of an op's inputs, ``gradient`` for the backward of
            an op, or ``jump`` for values that rounding moves across an edge of the op's derivative.
        db: Accuracy in dB if nothing else were rounded, in the batch and output with the largest error;
            ``None`` if exact.
        share: Share of the whole error there, from 0 to 1.
        layer: Module path of the op.
        op: Name of the ATen op.
        source: Line of the model's code.
    """

    name: str
    kind: NoiseKind
    db: float | None
    share: float
    layer: str = ""
    op: str = ""
    source: Source | None = None
