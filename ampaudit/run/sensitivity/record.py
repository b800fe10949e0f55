"""What probes have found in a run, as data that joins batch by batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

__all__ = ["BackwardKind", "Collected", "ProbedColumn", "SensitivityRecord", "mean_of"]

Key = TypeVar("Key", bound=Hashable)
BackwardKind = Literal["gradient", "jump"]


class Collected(NamedTuple):
    """The squared errors that one probe found: by value, by value and reader, and by op for its backward."""

    own: dict[str, float]
    reads: dict[tuple[str, str], float]
    backward: dict[tuple[str, BackwardKind], float]


@dataclass(frozen=True, slots=True)
class ProbedColumn:
    """The mean of the probes of some outputs of a batch.

    Attributes:
        name: of the outputs and the batch.
        own: by value, what its own rounding adds where it is in 16 bits.
        reads: value, reader, and what casting the value for it adds.
        backward: value, kind, and what its op's backward adds.
    """

    name: str
    own: dict[str, float]
    reads: list[tuple[str, str, float]]
    backward: list[tuple[str, BackwardKind, float]]


@dataclass(slots=True)
class SensitivityRecord:
    """What the probes of some batches found.

    Attributes:
        columns: of all batches, in their order.
        probes: backward passes.
        measured: by batch, the squared error of all gradients relative to their squares, if those are probed.
    """

    columns: list[ProbedColumn] = field(default_factory=list)
    probes: int = 0
    measured: list[float] = field(default_factory=list)

    def add(self, name: str, probes: Sequence[Collected]) -> None:
        """Add a column: the mean of its probes."""
        self.probes += len(probes)
        self.columns.append(mean_of(name, probes))

    def join(self, later: SensitivityRecord) -> None:
        """Add the record of later batches."""
        self.columns += later.columns
        self.probes += later.probes
        self.measured += later.measured


def mean_of(name: str, probes: Sequence[Collected]) -> ProbedColumn:
    """Return the mean of some probes; what one of them lacks adds nothing there."""
    own = _mean([found.own for found in probes])
    reads = _mean([found.reads for found in probes])
    backward = _mean([found.backward for found in probes])
    return ProbedColumn(
        name,
        own,
        [(made, reader, energy) for (made, reader), energy in reads.items()],
        [(made, kind, energy) for (made, kind), energy in backward.items()],
    )


def _mean(probes: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    keys = dict.fromkeys(key for found in probes for key in found)
    return {key: sum(found.get(key, 0.0) for found in probes) / len(probes) for key in keys}
