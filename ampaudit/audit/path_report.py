"""Reports the lines that decide on values, where the audit followed the path of its inputs."""

from __future__ import annotations

from ampaudit.audit.checks.interface import CheckContext, source_of
from ampaudit.report.input_path import InputPath, ReadLine
from ampaudit.run.path_record import ReadStats
from ampaudit.trace.path.reads import ReadKind

__all__ = ["path_report"]

_ANSWERS = 2  # values of one line


def path_report(context: CheckContext) -> InputPath | None:
    """Return the lines that decided the path; ``None`` if the graph is for all inputs."""
    record = context.record.path
    if not record.paths:
        return None
    lines = [
        ReadLine(
            name=stats.name,
            kind=stats.kind.value,
            layer=stats.layer,
            source=source_of(stats.source, stats.caller),
            reads=stats.reads,
            differing=stats.differing,
            batch=stats.batch,
            fp32=_answers(stats),
            low=stats.low,
        )
        for stats in record.reads.values()
    ]
    return InputPath(len(record.paths), tuple(lines))


def _answers(stats: ReadStats) -> str:
    """Return what was read in FP32: the read that differs, or each value with its number of times."""
    if stats.differing or len(stats.answers) == 1 or stats.kind is not ReadKind.CHOICE:
        return stats.fp32
    listed = ", ".join(f"{value} {count}x" for value, count in stats.answers.most_common(_ANSWERS))
    return f"{listed}, ..." if len(stats.answers) > _ANSWERS else listed
