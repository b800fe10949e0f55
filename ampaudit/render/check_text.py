"""One table for all targets, then what is wrong with each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.core.text import escape_control, format_bytes
from ampaudit.render.grid import labelled, open_table
from ampaudit.report.budgets import Measurements
from ampaudit.report.check import CheckResults, TargetResult

__all__ = ["render_results"]

_STYLES = {"pass": "bold green", "fail": "bold red", "error": "bold yellow"}
_SHOWN = 12


def render_results(check: CheckResults) -> RenderableType:
    """A row per target, the breaches, the errors with their next step."""
    results = check.targets
    metric = any(r.measured is not None and r.measured.metric_drop is not None for r in results)
    names = [
        "target",
        "",
        "headroom",
        "output",
        "FP32",
        *(["metric drop"] if metric else []),
        "time",
        "memory",
    ]
    table = open_table(*names, left=("",))
    for result in results:
        table.add_row(*_row(result, metric))
    parts: list[RenderableType] = [table]
    for result in results:
        lines = list(_lines(result))
        if lines:
            parts += [Text(), Text(escape_control(result.target), "bold"), labelled(lines)]
    failed = sum(result.exit_code != 0 for result in results)
    total = f"{len(results)} target{'s' if len(results) != 1 else ''}"
    verdict = Text("PASS  ", "bold green") if not failed else Text("FAIL  ", "bold red")
    parts += [Text(), verdict + Text(f"{total} checked" if not failed else f"{failed} of {total}")]
    return Group(*parts)


def _lines(result: TargetResult) -> Iterator[tuple[str, str]]:
    for breach in result.breaches[:_SHOWN]:
        yield f"  {breach.budget}", f"{escape_control(breach.where)}: {escape_control(breach.what)}"
    if len(result.breaches) > _SHOWN:
        yield "", f"and {len(result.breaches) - _SHOWN} more"
    for number, line in enumerate(result.error.splitlines()):
        yield "" if number else "  error", escape_control(line.strip())
    for note in result.notes:
        yield "  note", escape_control(note)


def _output(seen: Measurements) -> str:
    if seen.broken:
        return "broken"
    return f"{seen.sqnr_db:.0f} dB" if seen.sqnr_db is not None else "exact"


def _row(result: TargetResult, metric: bool) -> list[str | Text]:
    seen = result.measured
    bits = seen.headroom_bits if seen else None
    drop = seen.metric_drop if seen else None
    return [
        Text(escape_control(result.target), overflow="fold"),
        Text(result.verdict.upper(), _STYLES[result.verdict]),
        f"{bits:.1f} bits" if bits is not None else "",
        _output(seen) if seen else "",
        f"{seen.fp32_share:.0%}" if seen else "",
        *([f"{drop:.3g}" if drop is not None else ""] if metric else []),
        f"{result.seconds:.1f} s",
        format_bytes(result.peak_bytes) if result.peak_bytes else "",
    ]
