"""The document of ``check``: the result of each target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ampaudit.report.baseline import KnownFinding, KnownTarget
from ampaudit.report.budgets import Breach, Measurements
from ampaudit.report.card import CardRows, Shown, counted
from ampaudit.report.finding import Gate, pass_or_fail

__all__ = ["CheckResults", "Request", "TargetResult"]


@dataclass(frozen=True, slots=True)
class Request:
    """One target and how to check it, sent to a worker process as JSON.

    Attributes:
        target: a model file, a converted directory, a ``.pt2`` or ``.onnx`` file.
        options: options of the audit and of the source by name.
        budgets: fields of ``Budgets``.
        baseline: what a baseline has of the target; ``None`` without a baseline.
        update_baseline: whether the baseline will accept what is found.
        number: of the target, by which processes of several ranks find each other.
    """

    target: str
    options: dict[str, object]
    budgets: dict[str, object]
    baseline: tuple[KnownTarget, ...] | None = None
    update_baseline: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class TargetResult:
    """The result of one target.

    Attributes:
        target: which.
        verdict: ``pass``, ``fail`` (its report has an error, or a budget is exceeded), or ``error`` (it could
            not be audited).
        exit_code: 0, 1, or the error's: 2 for bad input, 3 for an audit that could not be carried out.
        breaches: what is exceeded.
        known: what would be, but for the baseline.
        gone: findings of the baseline that no longer occur.
        accepted: what the baseline accepts from now on, with ``--update-baseline``.
        measured: what was measured.
        policy: under which policy.
        dtype: in which format.
        error: what went wrong, where, and what to do next.
        seconds: wall-clock time.
        peak_bytes: largest resident memory of the process and its children, as far as it was sampled.
        notes: what a reader should know.
    """

    target: str
    verdict: Literal["pass", "fail", "error"]
    exit_code: int
    breaches: tuple[Breach, ...] = ()
    known: tuple[Breach, ...] = ()
    gone: tuple[KnownFinding, ...] = ()
    accepted: KnownTarget | None = None
    measured: Measurements | None = None
    policy: str = ""
    dtype: str = ""
    error: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class CheckResults(Shown):
    """The results of all targets."""

    schema: Literal[1]
    verdict: Gate
    gate: Gate
    targets: tuple[TargetResult, ...]
    kind: Literal["check"] = "check"

    @property
    def exit_code(self) -> int:
        """The gravest of all targets: 3 (not audited), 2 (bad input), 1 (budget exceeded) or 0."""
        return max((target.exit_code for target in self.targets), default=0)

    @classmethod
    def of(cls, targets: Sequence[TargetResult]) -> CheckResults:
        """Collect results: the verdict is on what was found, the gate on what the budgets make of it."""
        passed = all(target.verdict == "pass" for target in targets)
        gate = pass_or_fail(all(target.exit_code == 0 for target in targets))
        return cls(1, pass_or_fail(passed), gate, tuple(targets))

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        return f"{self.verdict.upper()} {counted(len(self.targets), 'target')}"

    def card_rows(self) -> CardRows:
        """Return the targets."""
        return [
            (
                target.verdict,
                target.target,
                target.error.split("\n")[0] or ", ".join(b.budget for b in target.breaches),
            )
            for target in self.targets
        ]
