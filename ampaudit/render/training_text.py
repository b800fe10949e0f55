"""The report of training runs for people: verdict, curves, what went wrong, and the health of each layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.core.text import escape_control, format_bytes, format_number, format_scale
from ampaudit.render.grid import labelled, open_table
from ampaudit.render.text import finding_text
from ampaudit.report.finding import Severity
from ampaudit.report.training import ParameterHealth, TrainingReport, Variant

__all__ = ["render_training", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 38


def render_training(report: TrainingReport, *, verbosity: int = 0, rows: int = 5) -> RenderableType:
    """The report as something that rich can print; ``verbosity`` -1 is the verdict alone."""
    verdict = _verdict(report)
    if verbosity < 0:
        return verdict
    heading = Text.assemble(
        ("ampaudit ", "bold"),
        (report.tool.version, "bold"),
        f"  {escape_control(report.model.source)}: {report.steps} "
        f"steps of {report.optimizer} on {report.device}",
    )
    parts: list[RenderableType] = [heading, Text(), verdict]
    shown = [f for f in report.findings if verbosity > 0 or f.severity is not Severity.NOTE]
    for position, finding in enumerate(shown, 1):
        parts += [Text(), finding_text(finding, position, named=finding.site.partition("/")[0])]
    parts += [Text(), *_curves(report.variants)]
    for variant in report.variants[1:] or report.variants:
        parts += [Text(), *_health(variant, 10**6 if verbosity > 0 else rows)]
    parts += [Text(), labelled(_summary(report, len(report.findings) - len(shown)))]
    return Group(*parts)


def _verdict(report: TrainingReport) -> Text:
    errors = [f for f in report.findings if f.severity is Severity.ERROR]
    if report.verdict == "fail":
        reasons = f"{len(errors)} reason{'s' if len(errors) != 1 else ''}"
        what = f"training in {report.dtype} is not what it is in FP32: {reasons}"
        return Text.assemble(("FAIL", "bold red"), f"  {what}")
    others = [v.name for v in report.variants if v.name != "fp32"]
    return Text.assemble(("PASS", "bold green"), f"  {', '.join(others)}: the loss follows FP32's")


def _curves(variants: Sequence[Variant]) -> Iterable[RenderableType]:
    yield Text("Loss, from the same start on the same batches", style="bold")
    metric = any(v.metric is not None for v in variants)
    table = open_table("run", "curve", "first", "last", *(("metric",) if metric else ()), left=("curve",))
    low, high = _range(variants)
    for variant in variants:
        losses = [step.loss for step in variant.health.steps]
        last = variant.final_loss if variant.final_loss is not None else (losses[-1] if losses else None)
        row = (sparkline(losses, low, high), _shown(losses[0] if losses else None), _shown(last))
        table.add_row(escape_control(variant.name), *row, *((_shown(variant.metric),) if metric else ()))
    yield table
    yield Text()
    table = open_table("run", "skipped", "loss scale", "step", "memory", left=("loss scale",))
    for variant in variants:
        held = variant.peak_bytes if variant.peak_bytes is not None else variant.bytes_held
        row = (str(variant.health.skipped), _scale(variant), f"{variant.seconds * 1e3:.3g} ms")
        table.add_row(escape_control(variant.name), *row, format_bytes(held))
    yield table


def _range(variants: Sequence[Variant]) -> tuple[float, float]:
    """Of FP32's losses, so that a run that explodes does not flatten the others."""
    losses = [step.loss for step in variants[0].health.steps if step.loss is not None] if variants else []
    return (min(losses), max(losses)) if losses else (0.0, 1.0)


def sparkline(values: Sequence[float | None], low: float, high: float, width: int = _WIDTH) -> str:
    """A curve in one line; ``!`` is not finite."""
    if not values:
        return ""
    count = min(width, len(values))
    found: list[str] = []
    for place in range(count):
        part = values[place * len(values) // count : (place + 1) * len(values) // count]
        finite = [value for value in part if value is not None]
        if len(finite) < len(part):
            found.append("!")
            continue
        share = (sum(finite) / len(finite) - low) / (high - low) if high > low else 0.0
        found.append(_BLOCKS[min(max(int(share * len(_BLOCKS)), 0), len(_BLOCKS) - 1)])
    return "".join(found)


def _scale(variant: Variant) -> str:
    scales = [step.scale for step in variant.health.steps]
    if not scales or set(scales) == {1.0}:
        return ""
    first, last = scales[0], scales[-1]
    return format_scale(first) if len(set(scales)) == 1 else f"{format_scale(first)} to {format_scale(last)}"


def _shown(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else format_number(value)


def _health(variant: Variant, rows: int) -> Iterable[RenderableType]:
    health = variant.health
    parameters = sorted(health.parameters, key=lambda p: (-p.broken, -p.flushed, -(p.lost or 0.0)))
    yield Text(
        f"{escape_control(variant.name)} ({escape_control(variant.how)}): "
        f"gradients and updates, every {health.every} steps",
        style="bold",
    )
    columns = ("parameter", "gradient", "over steps", "zero", "flushed", "update", "lost")
    table = open_table(*columns, left=("over steps",))
    for parameter in parameters[:rows]:
        table.add_row(Text(escape_control(parameter.name), overflow="fold"), *_columns(parameter))
    yield table
    if len(parameters) > rows:
        yield Text(f"and {len(parameters) - rows} more; -v lists all", "dim")


def _columns(parameter: ParameterHealth) -> tuple[str, ...]:
    peaks = [math.log2(p) if p else (None if p is None else -40.0) for p in parameter.gradient_peaks]
    finite = [p for p in peaks if p is not None]
    largest = max((p for p in parameter.gradient_peaks if p is not None), default=None)
    return (
        _shown(largest),
        sparkline(peaks, min(finite, default=0.0), max(finite, default=1.0), 16),
        f"{parameter.zero:.1%}",
        f"{parameter.flushed:.1%}",
        "" if parameter.update_ratio is None else f"{parameter.update_ratio:.2g}",
        "" if parameter.lost is None else f"{parameter.lost:.0%}",
    )


def _summary(report: TrainingReport, hidden: int) -> list[tuple[str, str]]:
    gpu = any(v.peak_bytes is not None for v in report.variants)
    held = "of parameters, gradients and the optimizer's state; a CPU's step times say nothing about a GPU's"
    rows = [
        ("Memory", "allocated at most" if gpu else held),
        ("Zero", "share of gradient elements that are zero, for whatever reason"),
        ("Flushed", f"share of gradient elements below what {report.dtype} holds under the step's scale"),
        ("Update", "norm of the update over that of the weights, median over steps"),
        ("Lost", f"share of updates that {report.dtype} weights would lose: less than half an ulp"),
    ]
    rows += [("Note", escape_control(note)) for note in report.notes]
    if hidden:
        more = f"{hidden} more finding{'s' if hidden != 1 else ''} of severity note; -v shows them"
        rows.append(("Notes", more))
    return rows
