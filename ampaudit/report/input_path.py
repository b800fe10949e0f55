"""The path that a model's code took through decisions on values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.finding import Source

__all__ = ["InputPath", "ReadLine"]


@dataclass(frozen=True, slots=True)
class ReadLine:
    """A line of the model's code that reads values of tensors.

    Attributes:
        name: how: ``bool``, ``item``, ``tolist``, ``numpy``; or the op whose size depends on values.
        kind: what Python makes of them: a choice (boolean or integer), a number, or an array.
        layer: path of the module whose forward reads them.
        source: the line.
        reads: how often it was run, over all batches.
        differing: how often it decides differently on the values of the 16-bit run.
        batch: number of the first batch in which it does.
        fp32: the value that was read, of the first read that differs or else the first.
        low: the same in 16 bits.
    """

    name: str
    kind: Literal["choice", "number", "array"]
    layer: str
    source: Source | None
    reads: int
    differing: int
    batch: int | None
    fp32: str
    low: str


@dataclass(frozen=True, slots=True)
class InputPath:
    """What an audit along the path of its inputs rests on.

    Attributes:
        count: different paths that the batches took.
        lines: what decided them, in the order of the run.
    """

    count: int
    lines: tuple[ReadLine, ...]

    @property
    def reads(self) -> int:
        """The number of reads."""
        return sum(line.reads for line in self.lines)
