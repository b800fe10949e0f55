"""Records where a model's code differs between 16 bits and FP32, and the effect on its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ampaudit.core.decibels import ratio_db
from ampaudit.core.sites import SourceLine
from ampaudit.trace.compare import CodeDifference

__all__ = ["AGREEMENT_DB", "CodeRecord", "OutputDifference"]

# FP32's own noise in deep models is 100 dB and better, a 16-bit rounding 70 dB
AGREEMENT_DB = 80.0


@dataclass(slots=True)
class OutputDifference:
    """One output against the FP32 model, summed over the batches that differ.

    Attributes:
        name: of the output.
        problem: why it cannot be compared, if so.
        integers: whether it holds integers; squares are then counts of elements, and of those that differ.
        ref_sq: sum of squares of the FP32 model's output.
        err_sq: of the 16-bit run's error.
        code_err_sq: of the error that the same code has in FP32: what the code alone does.
    """

    name: str
    problem: str | None = None
    integers: bool = False
    ref_sq: float = 0.0
    err_sq: float = 0.0
    code_err_sq: float = 0.0

    @property
    def sqnr_db(self) -> float:
        """Accuracy of the 16-bit run; infinite where it is exact."""
        return ratio_db(self.ref_sq, self.err_sq)

    @property
    def code_sqnr_db(self) -> float:
        """Accuracy of the 16-bit code path when computed in FP32."""
        return ratio_db(self.ref_sq, self.code_err_sq)

    @property
    def agrees(self) -> bool:
        """Whether the code makes no difference to this output."""
        return self.problem is None and self.code_sqnr_db >= AGREEMENT_DB

    def merge(self, other: OutputDifference) -> None:
        """Add another batch."""
        self.problem = self.problem or other.problem
        self.integers |= other.integers
        self.ref_sq += other.ref_sq
        self.err_sq += other.err_sq
        self.code_err_sq += other.code_err_sq


@dataclass(slots=True)
class CodeRecord:
    """The results of the eager runs of the FP32 model.

    Attributes:
        batches: how many were run and compared.
        failure: why one could not be run.
        untraced: whether the FP32 model could not be traced either, to compare the traces.
        reads: lines that read a precision, of the trace that differs.
        place: where the traces differ first.
        outputs: by name; empty where 16 bits take the code of FP32.
    """

    batches: int = 0
    failure: str | None = None
    untraced: bool = False
    reads: tuple[SourceLine, ...] = ()
    place: CodeDifference | None = None
    outputs: dict[str, OutputDifference] = field(default_factory=dict)

    def join(self, later: CodeRecord) -> None:
        """Add what later batches showed."""
        self.batches += later.batches
        self.failure = self.failure or later.failure
        self.untraced |= later.untraced
        self.note(later.outputs.values(), later.place, later.reads)

    def note(
        self, found: Iterable[OutputDifference], place: CodeDifference | None, reads: tuple[SourceLine, ...]
    ) -> None:
        """Add a batch whose outputs differ from those of the FP32 model."""
        self.place = self.place or place
        self.reads = self.reads or reads
        for difference in found:
            if difference.name in self.outputs:
                self.outputs[difference.name].merge(difference)
            else:
                self.outputs[difference.name] = replace(difference)
