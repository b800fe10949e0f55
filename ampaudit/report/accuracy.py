"""The accuracy of an output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number

__all__ = ["LOST_DB", "OutputAccuracy"]

LOST_DB = 10.0  # below it, the error is a third or more of an output's variation


@dataclass(frozen=True, slots=True)
class OutputAccuracy:
    """The accuracy of one output tensor, in its worst batch.

    Attributes:
        name: where it was found.
        site: the site that makes it.
        sqnr_db: signal-to-noise ratio against FP32; of integers, 20 log10(1 / share that differs). Null
            where both agree exactly, or where ``problem`` says why there is no number.
        kind: ``float``, ``complex`` (two floats per element) or ``integer`` (including booleans).
        differing: integers that differ.
        problem: why no accuracy can be given although the output is wrong; empty otherwise.
        variation_db: signal-to-noise ratio of what varies in it or in its rows, the mean taken out, whichever
            is lowest; null for integers, for fewer than 16 elements, and where nothing varies or both agree.
        constant: the value that FP32 gives everywhere, of floats; its accuracy says nothing of other inputs.
        empty: whether it has no elements.
        repaired: whether it is inf or NaN in 16 bits, and the accuracy is that with the faults repaired.
        batch: name of its worst batch, such as ``call 14`` of a recording; null if that has none.
    """

    name: str
    site: SiteId | None
    sqnr_db: float | None
    kind: Literal["float", "complex", "integer"] = "float"
    differing: int = 0
    problem: str = ""
    variation_db: float | None = None
    constant: float | None = None
    empty: bool = False
    repaired: bool = False
    batch: str | None = None

    @property
    def accuracy_db(self) -> float | None:
        """``sqnr_db``; -inf if the output is broken."""
        return -math.inf if self.problem else self.sqnr_db

    @property
    def where(self) -> str:
        """The batch in which it is worst; empty if that has no name, or the output is exact."""
        return f" in {self.batch}" if self.batch and (self.problem or self.sqnr_db is not None) else ""

    @property
    def in_words(self) -> str:
        """The accuracy as tables show it."""
        if self.problem:
            return "wrong"
        if self.kind == "integer" and self.differing:
            return f"{self.differing:,} differ"
        if self.empty:
            return "empty"
        if self.constant is not None:
            return f"{format_number(self.constant)} everywhere in FP32, which says nothing about its accuracy"
        if self.sqnr_db is None:
            return "exact"
        varies = self.variation_db
        lost = varies is not None and varies < min(LOST_DB, self.sqnr_db - LOST_DB)
        aside = f" ({varies:.0f} dB without its mean)" if lost else ""
        return f"{self.sqnr_db:.0f} dB{aside}"
