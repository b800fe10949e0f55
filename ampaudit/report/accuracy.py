"""How accurate the outputs are, in a word."""

from __future__ import annotations

from ampaudit.core.text import format_number
from ampaudit.report.model import OutputAccuracy, Report

__all__ = ["LOST_DB", "accuracy_word", "output_word", "worst_output"]

LOST_DB = 10.0  # the error is a third or more of what varies in an output


def worst_output(report: Report) -> OutputAccuracy | None:
    """The least accurate output; ``None`` if all are exact, or there is none."""
    known = [output for output in report.outputs if output.accuracy_db is not None]
    return min(known, key=lambda output: output.accuracy_db or 0.0, default=None)


def output_word(report: Report) -> str:
    """How accurate the least accurate output is: ``63 dB``, ``exact`` or ``broken``."""
    if report.broken_outputs:
        return "broken"
    worst = worst_output(report)
    return accuracy_word(worst) if worst is not None else "exact"


def accuracy_word(output: OutputAccuracy) -> str:
    """The accuracy of one output, as tables have it."""
    if output.problem:
        return "wrong"
    if output.kind == "integer" and output.differing:
        return f"{output.differing:,} differ"
    if output.empty:
        return "empty"
    if output.constant is not None:
        return f"{format_number(output.constant)} everywhere in FP32, which says nothing of its accuracy"
    if output.sqnr_db is None:
        return "exact"
    varies = output.variation_db
    lost = varies is not None and varies < min(LOST_DB, output.sqnr_db - LOST_DB)
    aside = f" ({varies:.0f} dB without its mean)" if lost else ""
    return f"{output.sqnr_db:.0f} dB{aside}"
