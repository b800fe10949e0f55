"""Renders training runs: verdict, curves, findings, and the health of each parameter."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from ampaudit.core.text import format_bytes, format_number, format_scale, plural
from ampaudit.findings.finding import Severity, threshold
from ampaudit.render.blocks import Block, Line, Section, Table, facts, headline, line, tabulate
from ampaudit.render.findings import Alert, Suite, alert_of, finding_sections
from ampaudit.render.view import Row, View
from ampaudit.report.training import ParameterHealth, TrainingReport, Variant
from ampaudit.views.verdict import verdict_section

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH, _PARAMETERS = 38, 5


class TrainingView(View[TrainingReport]):
    """A suite with a case per run; a row per parameter and run."""

    about = "model.source"

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render the verdict, findings, curves, and the parameters in the worst health."""
        report = self.document
        verdict = verdict_section(report.verdict, self._sentence(), self.gate)
        if verbosity < 0:
            yield verdict
            return
        optimizer = f" of {report.optimizer}" if report.optimizer else ""
        device = f" on {report.device}" if report.device else ""
        extent = f"{plural(report.steps, 'step')}{optimizer}{device}"
        yield headline(report.tool.version, f"{self.name}: {extent}")
        yield verdict
        alerts = self._alerts()
        visible = [alert for alert in alerts if verbosity > 0 or alert.level is not Severity.NOTE]
        yield from finding_sections(visible)
        yield from _curves(report)
        for variant in report.variants[1:] if report.reference is not None else report.variants:
            if not variant.health.parameters:
                continue
            yield _health(variant, len(variant.health.parameters) if verbosity > 0 else _PARAMETERS)
        yield Section((facts(_summary(report, len(alerts) - len(visible))),))

    def suites(self) -> tuple[Suite, ...]:
        """Return the runs as one suite."""
        report = self.document
        suite = Suite(
            name=self.name,
            label=f"training, {report.dtype}",
            verdict=report.verdict,
            gate=self.gate,
            cases=tuple(variant.name for variant in report.variants),
            alerts=self._alerts(),
            tool_version=report.tool.version,
        )
        return (suite,)

    def rows(self) -> Iterator[Row]:
        """Return a row per parameter and run."""
        names = ("elements", "zero", "flushed", "broken", "update_ratio", "lost", "state_flushed")
        for variant in self.document.variants:
            for parameter in variant.health.parameters:
                yield {
                    "run": variant.name,
                    "parameter": parameter.name,
                    "gradient_peak": parameter.largest_gradient,
                    **{name: getattr(parameter, name) for name in names},
                }

    def digest(self) -> Iterator[Section | Suite]:
        """Return the suite, and a row per run."""
        yield from self.suites()
        rows = [
            (
                line((v.name, "code")),
                _shown(v.final_loss) if v.health.recorded else None,
                None if v.metric is None else _shown(v.metric),
                _skips(v),
            )
            for v in self.document.variants
        ]
        yield Section((_without_empty_columns(("run", "last loss", "metric", "skipped steps"), rows),))

    def _alerts(self) -> tuple[Alert, ...]:
        report = self.document
        failing = threshold(report.fail_on) if report.gate == "fail" else math.inf
        return tuple(
            alert_of(f, f.site.rpartition("/")[0], failing, f.site.partition("/")[0]) for f in report.findings
        )

    def _sentence(self) -> str:
        report = self.document
        errors = plural(sum(f.severity is Severity.ERROR for f in report.findings), "finding")
        extent = plural(report.steps, "watched step")
        if report.verdict == "fail":
            deviates = f"{report.dtype} training deviates from FP32 ({errors})"
            return f"{errors} in {extent}" if report.reference is None else deviates
        if report.steps == 0:
            return "no step was watched: the optimizer was never stepped"
        if report.reference is None:
            return f"no error in {extent}"
        failing = {f.site.rpartition("/")[0] for f in report.findings if f.severity is Severity.ERROR}
        runs = [variant.name for variant in report.variants if variant.name != "fp32"]
        follow = ", ".join(name for name in runs if name not in failing)
        deviate = ", ".join(name for name in runs if name in failing)
        parts = (
            follow and f"{follow}: the loss follows FP32's",
            deviate and f"{deviate}: it deviates ({errors})",
        )
        return "; ".join(filter(None, parts))


def _curves(report: TrainingReport) -> Iterator[Section]:
    """Render losses and costs, without columns for what no run measured."""
    variants = report.variants
    low, high = _range(variants)
    scored = any(variant.metric is not None for variant in variants)
    curves = [_curve(variant, low, high, scored) for variant in variants if variant.health.recorded]
    if curves:
        together = ", from the same start on the same batches" if report.reference is not None else ""
        yield Section(
            (_without_empty_columns(("run", "curve", "first", "last tenth", "metric"), curves, ("curve",)),),
            f"Loss{together}",
        )
    if report.steps:
        costs = [_cost(variant) for variant in variants]
        if all(cell is None for row in costs for cell in row[1:]):
            return
        yield Section(
            (
                _without_empty_columns(
                    ("run", "skipped", "loss scale", "step", "memory"), costs, ("loss scale",)
                ),
            )
        )


def _without_empty_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str | Line | None]], left: Collection[str] = ()
) -> Table:
    """Make a table of the columns in which some row has a value."""
    columns = [index for index in range(len(heads)) if any(row[index] is not None for row in rows)]
    cells = [[row[index] or "" for index in columns] for row in rows]
    return tabulate([heads[index] for index in columns], cells, left=left)


def _curve(variant: Variant, low: float, high: float, scored: bool) -> tuple[str | None, ...]:
    recorded = variant.health.recorded
    last = variant.final_loss if variant.final_loss is not None else recorded[-1].loss
    metric = _shown(variant.metric) if scored else None
    curve = sparkline([step.loss for step in recorded], low, high)
    return variant.name, curve, _shown(recorded[0].loss), _shown(last), metric


def _cost(variant: Variant) -> tuple[str | None, ...]:
    memory = variant.peak_bytes if variant.peak_bytes is not None else variant.bytes_held
    return (
        variant.name,
        _skips(variant),
        _scale(variant) or None,
        f"{variant.seconds * 1e3:.3g} ms" if variant.seconds else None,  # older reports say 0
        format_bytes(memory) if memory else None,
    )


def _range(variants: Sequence[Variant]) -> tuple[float, float]:
    """Return the range of the FP32 losses, so that a diverging run does not flatten the other curves."""
    losses = [step.loss for step in variants[0].health.steps if step.loss is not None] if variants else []
    return (min(losses), max(losses)) if losses else (0.0, 1.0)


def sparkline(values: Sequence[float | None], low: float, high: float, width: int = _WIDTH) -> str:
    """Draw a curve of block characters; ``!`` marks values that are not finite."""
    count = min(width, len(values))
    letters: list[str] = []
    for place in range(count):
        part = values[place * len(values) // count : (place + 1) * len(values) // count]
        finite = [value for value in part if value is not None]
        if len(finite) < len(part):
            letters.append("!")
            continue
        share = (sum(finite) / len(finite) - low) / (high - low) if high > low else 0.0
        letters.append(_BLOCKS[min(max(int(share * len(_BLOCKS)), 0), len(_BLOCKS) - 1)])
    return "".join(letters)


def _skips(variant: Variant) -> str | None:
    health = variant.health
    return str(health.skipped) if health.scaled or health.skipped else None


def _scale(variant: Variant) -> str:
    scales = [step.scale for step in variant.health.steps]
    if not scales or set(scales) == {1.0}:
        return ""
    first, last = scales[0], scales[-1]
    return format_scale(first) if len(set(scales)) == 1 else f"{format_scale(first)} to {format_scale(last)}"


def _shown(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else format_number(value)


def _health(variant: Variant, rows: int) -> Section:
    health = variant.health
    parameters = sorted(health.parameters, key=lambda p: (-p.broken, -p.flushed, -(p.lost or 0.0)))
    run = f"{variant.name} ({variant.how})"
    heads = ("parameter", "gradient", "over steps", "zero", "flushed", "update", "lost")
    blocks: list[Block] = [tabulate(heads, map(_parameter, parameters[:rows]), left=("over steps",))]
    if len(parameters) > rows:
        blocks.append(line(f"and {len(parameters) - rows} more; -v lists all", style="dim"))
    often = "every step" if health.every == 1 else f"every {health.every} steps"
    return Section(tuple(blocks), f"{run}: gradients and updates, {often}")


def _parameter(parameter: ParameterHealth) -> tuple[str, ...]:
    peaks = [math.log2(p) if p else (None if p is None else -40.0) for p in parameter.gradient_peaks]
    finite = [p for p in peaks if p is not None]
    return (
        parameter.name,
        _shown(parameter.largest_gradient),
        sparkline(peaks, min(finite, default=0.0), max(finite, default=1.0), 16),
        f"{parameter.zero:.1%}",
        f"{parameter.flushed:.1%}",
        "" if parameter.update_ratio is None else f"{parameter.update_ratio:.2g}",
        "" if parameter.lost is None else f"{parameter.lost:.0%}",
    )


def _summary(report: TrainingReport, hidden: int) -> Iterator[tuple[str, str]]:
    gpu = any(v.peak_bytes is not None for v in report.variants)
    meaning = (
        "of parameters, gradients and the optimizer's state; a CPU's step times say nothing about a GPU's"
    )
    if gpu or any(v.bytes_held for v in report.variants):
        yield "Memory", "allocated at most" if gpu else meaning
    if any(v.health.parameters for v in report.variants):
        yield "Zero", "share of gradient elements that are zero, for whatever reason"
        yield "Flushed", f"share of gradient elements below what {report.dtype} holds under the step's scale"
        yield "Update", "norm of the update over that of the weights, median over steps"
        yield "Lost", f"share of updates that {report.dtype} weights would lose: less than half an ulp"
    for note in report.notes:
        yield "Note", note
    if hidden:
        yield "Notes", f"{plural(hidden, 'more finding')} of severity note; -v shows them"
