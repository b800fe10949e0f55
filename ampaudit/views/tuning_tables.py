"""Renders the tables of a tuning: what stays in float32, storage, the frontier, what was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from ampaudit.core.formats import FORMATS
from ampaudit.core.text import format_bytes, format_number, listed, plural, short_op
from ampaudit.findings.finding import Source
from ampaudit.render.blocks import Block, Section, facts, line, tabulate
from ampaudit.report.tuning import FrontierPoint, KeptOp, Noise, TuningReport
from ampaudit.views.plan import stacked

_ROWS, _MAX_ROWS = 10, 200
_KINDS = {
    "weight": "(weight)",
    "cast": "(its casts)",
    "gradient": "(its backward)",
    "jump": "(jumps of its derivative)",
}
_FINITE = 3000.0  # dB; beyond it, the power of ten overflows
_DOUBLED = 3.0  # dB; beyond it, the error is over twice or under half of the prediction
_SHOWN, _POINTS = 25, 10
_WHY = {"range": "out of range", "accuracy": "accuracy needs it", "decision": "flips a decision"}
_STEPS = {
    "start": "start",
    "solve": "choose",
    "shrink": "leave out",
    "exhaustive": "leave out one",
    "final": "final",
}
_COSTS = {
    "ops": "the number of ops in float32",
    "bytes": "bytes that ops in float32 and casts read and write",
    "time": "time of ops in float32 and of casts, estimated by a roofline",
}


def tuning_verdict(report: TuningReport) -> tuple[str, str]:
    """Return ``PASS`` or ``FAIL``, the accuracy that was reached, and what it takes."""
    clauses = [f"{_choice_words(report)} has {_reached(report)}"]
    if report.kept or report.weights:
        low = format_accuracy(report.low_db, broken=report.low_broken)
        clauses.append(f"everything in 16 bits {'is' if low == 'exact' else 'has'} {low}")
    clauses += _bound(report)
    return "PASS" if report.reached else "FAIL", "; ".join(clauses)


def _format(report: TuningReport) -> str:
    return report.dtype if report.dtype in FORMATS else "16 bits"


def _choice_words(report: TuningReport) -> str:
    """Describe the choice: the format, and what is in float32."""
    ops = f"{len(report.kept):,} of {plural(report.ops, 'op')}" if report.kept else "no op"
    weights = f" and {plural(len(report.weights), 'weight')} stored in float32" if report.weights else ""
    return f"{_format(report)} with {ops} in float32{weights}"


def _reached(report: TuningReport) -> str:
    """Describe the measured accuracy and the required one."""
    measured = format_accuracy(report.measured_db, broken=report.broken)
    measured = "outputs exactly as in FP32" if measured == "exact" else measured
    if report.metric is not None and report.metric_drop is not None:
        exact, tuned = map(format_number, report.metric)
        condition = f"FP32 has {exact}; a drop of {report.metric_drop:g} is allowed"
        return f"a metric of {tuned} ({condition}) and {measured}"
    return measured + ("" if report.target_db is None else f" ({report.target_db:g} required)")


def _bound(report: TuningReport) -> Iterator[str]:
    """Describe the lower bound on the number of float32 ops."""
    count, least = len(report.kept), report.lower_bound
    if not report.reached or not count:
        return
    tried = [op for op in report.kept if op.why != "range"]
    if not tried:
        yield "these ops stay for range, not accuracy"
        return
    if report.minimal:
        yield f"without any one {'of them' if len(tried) == count else 'that accuracy needs'} it falls short"
    if least >= count:
        yield "fewer do not suffice, by the error model"
    elif least > 0:
        yield f"at least {least:,} must stay, by the error model"


def tuning_tables(report: TuningReport, *, full: bool, grouped: bool) -> Iterator[Section]:
    """Render everything but the rule file: all rows if ``full``, stacked layers merged if ``grouped``."""
    limit = None if full else _SHOWN
    if report.kept:
        yield _kept_ops(report, limit, full=full, grouped=grouped)
    if report.weights:
        yield _kept_weights(report, limit, grouped=grouped)
    yield Section((facts(_summary(report)),))
    if report.frontier:
        yield _frontier(report)
    if report.tried:
        yield _tried(report, full=full)
    yield from _model_of_errors(report, full=full)
    if report.rescale:
        lines = (line(text, wrap=False) for text in report.rescale.splitlines())
        yield Section(tuple(lines), "Rescaling weights by powers of two makes some of it unnecessary")
    yield Section((facts(_remarks(report)),))


def tuning_summary(report: TuningReport) -> Section:
    """Render what stays in float32 and its cost, and how to see more."""
    ops = [name for name, *_ in stacked(report.kept, lambda k: k.site, lambda k: (k.why, k.op), False)]
    weights = [name for name, *_ in stacked(report.weights, lambda w: w.name, lambda w: (w.why,), False)]
    kept_names = {"Ops kept": ops, "Weights kept": weights}
    rows = [(label, listed(names, 5)) for label, names in kept_names.items() if names]
    code = "PyTorch code that does it, " if report.code else ""
    more = (
        "More",
        f"-v shows {code}why each op stays, the frontier, what was tried, and the sources of error",
    )
    return Section((facts((*rows, *_summary(report), more)),))


def _least(values: Sequence[float | None]) -> str:
    finite = [value for value in values if value is not None]
    return format_accuracy(min(finite)) if finite else ""


def _kept_ops(report: TuningReport, limit: int | None, *, full: bool, grouped: bool) -> Section:
    """Return a row per op in float32, merged over stacked layers."""
    groups = list(stacked(report.kept, lambda k: k.site, lambda k: (k.why, k.op), not grouped))
    measured = any(op.measured_without_db is not None or op.broken_without for op in report.kept)
    rows = []
    for name, times, members in groups[:limit]:
        worst = min(members, key=lambda op: -math.inf if op.without_db is None else op.without_db)
        cells = (
            name,
            times,
            _least([op.without_db for op in members]),
            *((_measured_without(members),) if measured else ()),
            line_text(worst.source),
            (worst.text if worst.why != "accuracy" else "") or _WHY[worst.why],
            *((worst.source.user_line.code.strip() if worst.source is not None else "",) if full else ()),
        )
        rows.append(cells)
    without = ("without it", *(("measured",) if measured else ()))
    heads = ("op", "times", *without, "line", "because", *(("code",) if full else ()))
    table = tabulate(heads, rows, left=("line", "because", "code"))
    what = f"Without it: predicted accuracy of the outputs with this op in {_format(report)} after all"
    what += "; measured: the same, from a run." if measured else "."
    title = f"What stays in float32 ({len(report.kept):,} of {plural(report.ops, 'op')})"
    return Section((line(what, style="dim"), table, *_more(len(groups), limit)), title)


def _measured_without(members: Sequence[KeptOp]) -> str:
    if any(op.broken_without for op in members):
        return format_accuracy(None, broken=True)
    return _least([op.measured_without_db for op in members])


def _kept_weights(report: TuningReport, limit: int | None, *, grouped: bool) -> Section:
    groups = list(stacked(report.weights, lambda w: w.name, lambda w: (w.why,), not grouped))
    rows = [
        (
            name,
            times,
            _least([weight.without_db for weight in members]),
            format_bytes(sum(weight.bytes for weight in members)),
            _WHY[members[0].why],
        )
        for name, times, members in groups[:limit]
    ]
    heads = ("weight", "times", "without it", "costs", "because")
    table = tabulate(heads, rows, left=("because",))
    form = _format(report)
    what = f"Without it: predicted accuracy with this weight stored in {form}; costs: bytes beyond that."
    title = f"Weights stored in float32 ({len(report.weights):,})"
    return Section((line(what, style="dim"), table, *_more(len(groups), limit)), title)


def _more(count: int, limit: int | None) -> Iterator[Block]:
    if limit is not None and count > limit:
        yield line(f"and {count - limit:,} more; -v shows all", style="dim")


def _summary(report: TuningReport) -> Iterator[tuple[str, str]]:
    ops, casts = f"{len(report.kept):,} of {plural(report.ops, 'op')}", plural(report.casts, "cast")
    yield "Arithmetic", f"{ops} in float32; {casts} per forward pass"
    share = f" ({report.bytes_after / report.bytes_before:.0%})" if report.bytes_before else ""
    sizes = f"{format_bytes(report.bytes_before)} before, {format_bytes(report.bytes_after)} after{share}"
    beyond = format_bytes(sum(weight.bytes for weight in report.weights))
    yield "Weights", sizes + (f"; float32 weights cost {beyond} of that" if report.weights else "")
    yield "Minimized", _COSTS[report.cost_kind]


def _frontier(report: TuningReport) -> Section:
    """Render about ten points of the frontier: the ends, the choice, measured ones, and some in between."""
    points = _chosen_points(report.frontier)
    cost = () if report.cost_kind == "ops" else ("cost",)
    rows = (
        (
            f"{point.ops:,}",
            f"{point.share:.1%}",
            f"{point.weights:,}",
            f"{point.casts:,}",
            *((_cost(report, point.cost),) if cost else ()),
            format_accuracy(point.predicted_db),
            _measured(point),
            line(("chosen", "bold") if point.chosen else ""),
        )
        for point in points
    )
    heads = ("ops in float32", "of all", "weights", "values cast", *cost, "predicted", "measured", "")
    extent = (
        "" if len(points) == len(report.frontier) else f", {len(points)} of {len(report.frontier)} choices"
    )
    what = "The accuracy for each number of ops in float32."
    return Section((line(what, style="dim"), tabulate(heads, rows, left=("",))), f"Frontier{extent}")


def _chosen_points(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Return at most about ten points, in order."""
    last = len(points) - 1
    indices = {0, last, *(i for i, point in enumerate(points) if point.chosen)}
    measured = [i for i, point in enumerate(points) if _measured(point)]
    indices |= set(measured[: _POINTS - len(indices)])
    for index in (round(step * last / (_POINTS - 1)) for step in range(_POINTS)):
        indices |= {index} if len(indices) < _POINTS else set()
    return [points[index] for index in sorted(indices)]


def _cost(report: TuningReport, cost: float) -> str:
    unit, factor = ("MB", 1e-6) if report.cost_kind == "bytes" else ("us", 1e6)
    return f"{format_number(factor * cost)} {unit}"


def _measured(point: FrontierPoint) -> str:
    run = point.broken or point.measured_db is not None
    return format_accuracy(point.measured_db, broken=point.broken) if run else ""


def point_words(report: TuningReport, point: FrontierPoint) -> str:
    """Describe a point of the frontier in a line."""
    measured = f", {_measured(point)} measured" if _measured(point) else ""
    chosen = "; chosen" if point.chosen else ""
    weights = f" and {plural(point.weights, 'weight')}" if point.weights else ""
    ops = f"{point.ops:,} of {plural(report.ops, 'op')}{weights} in float32"
    return f"{ops}: {format_accuracy(point.predicted_db)} predicted{measured}{chosen}"


def _tried(report: TuningReport, *, full: bool) -> Section:
    """Return the choices that were run; unless ``full``, those with one op less are only counted."""
    alone = [tried for tried in report.tried if tried.step == "exhaustive"]
    visible = report.tried if full else [tried for tried in report.tried if tried.step != "exhaustive"]
    metric = ("metric",) if any(tried.metric is not None for tried in report.tried) else ()
    heads = ("step", "what", "ops in float32", "predicted", "measured", *metric, "enough")
    rows = [
        (
            _STEPS[tried.step],
            tried.what,
            f"{tried.ops:,}",
            format_accuracy(tried.predicted_db),
            format_accuracy(tried.measured_db, broken=tried.broken),
            *(("" if tried.metric is None else format_number(tried.metric),) if metric else ()),
            line(("yes", "green") if tried.reached else ("no", "")),
        )
        for tried in visible
    ]
    blocks: list[Block] = [tabulate(heads, rows, left=("what", "enough"))]
    if alone and not full:
        enough = sum(tried.reached for tried in alone)
        rest = f"and {plural(len(alone), 'choice')} with one op fewer, {enough or 'none'} of them enough"
        blocks.append(line(f"{rest}; -v shows them", style="dim"))
    return Section(tuple(blocks), f"Tried ({plural(len(report.tried), 'choice')})")


def _model_of_errors(report: TuningReport, *, full: bool) -> Iterator[Section]:
    """Return the ranking of roundings, and predicted against measured accuracy."""
    if report.noise:
        yield noise_section(report.noise, full=full)
    pairs = [(_choice_words(report), report.predicted_db, report.measured_db, report.broken)]
    if report.kept or report.weights:
        pairs.append(
            (f"everything in {_format(report)}", report.low_predicted_db, report.low_db, report.low_broken)
        )
    lines: list[Block] = []
    for what, predicted, measured, broken in pairs:
        result = format_accuracy(measured, broken=broken)
        lines.append(line(f"{what}: {format_accuracy(predicted)} predicted, {result} measured"))
        lines += untrusted(predicted, measured)
    what = "The error of the outputs is predicted as the sum of what each rounding does to them."
    yield Section((line(what, style="dim"), *lines), "Model of errors")


def _remarks(report: TuningReport) -> Iterator[tuple[str, str]]:
    yield "Rule file", f"{report.name}, {plural(len(report.policy.splitlines()), 'line')}"
    yield "Runs", f"{report.runs:,}: forward passes in 16 bits, and backward passes that probe the outputs"
    if report.seconds:
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in report.seconds.items())
        yield "Seconds", f"{sum(report.seconds.values()):.1f}: {phases}"
    if report.inputs is not None and report.inputs.detail:
        yield "Inputs", report.inputs.detail
    for note in report.notes:
        yield "Note", note


def tuning_policy(report: TuningReport) -> Iterator[Section]:
    """Yield the rule file, and the same as PyTorch code."""
    yield _copied(report.policy, "Rule file")
    if report.code:
        yield _copied(report.code, code_title(report))


def code_title(report: TuningReport) -> str:
    """Return the heading of the PyTorch code."""
    layers = ", which keeps whole layers in float32" if report.kept or report.weights else ""
    return f"As PyTorch code{layers}"


def _copied(text: str, title: str) -> Section:
    return Section(tuple(line(part, wrap=False) for part in text.splitlines()), title)


def format_accuracy(value: float | None, *, broken: bool = False) -> str:
    """Format an accuracy: ``52.1 dB``, ``exact`` or ``inf or NaN``."""
    if broken:
        return "inf or NaN"
    if value is None:
        return "exact"
    return f"{value:.1f} dB" if abs(value) < 1e4 else f"{format_number(value)} dB"


def line_text(source: Source | None) -> str:
    """Format the file and line in the user's project; empty if unknown."""
    if source is None:
        return ""
    return f"{PurePath(source.user_line.file).name}:{source.user_line.line}"


def noise_section(rows: Sequence[Noise], *, full: bool = False, of: str = "outputs") -> Section:
    """Render the error that each rounding causes, merged over stacked layers unless ``full``."""
    stacks = stacked(rows, lambda row: row.name, lambda row: (row.kind, row.op), full)
    groups = [(name, times, _summed(members)) for name, times, members in stacks]
    groups.sort(key=lambda group: -group[2].share)
    visible = groups[: _MAX_ROWS if full else _ROWS]
    what = f"Accuracy of the {of} if only this were rounded, and its share of the total error."
    heads = ("rounded", "times", "op", "accuracy", "share", "line")
    table = tabulate(heads, (_cells(*group) for group in visible), left=("op", "line"))
    blocks: list[Block] = [line(what, style="dim"), table]
    if len(visible) < len(groups):
        rest = sum(row.share for _, _, row in groups[len(visible) :])
        where = "the JSON report has them" if full else "-v shows more"
        blocks.append(
            line(f"and {len(groups) - len(visible):,} more, with {_share(rest)}; {where}", style="dim")
        )
    return Section(tuple(blocks), f"Sources of error in the {of}")


def _summed(rows: Sequence[Noise]) -> Noise:
    noise = sum(10.0 ** (-row.db / 10.0) for row in rows if row.db is not None and abs(row.db) < _FINITE)
    db = rows[0].db if len(rows) == 1 else -10.0 * math.log10(noise) if noise else None
    return replace(rows[0], db=db, share=sum(row.share for row in rows))


def _cells(name: str, times: str, row: Noise) -> tuple[str, ...]:
    op = short_op(row.op) if row.kind == "op" else _KINDS[row.kind]
    return (
        name,
        times,
        op,
        format_accuracy(row.db),
        _share(row.share),
        line_text(row.source),
    )


def _share(share: float) -> str:
    return "<0.1%" if 0 < share < 5e-4 else f"{share:.1%}" if abs(share) < 1e4 else format_number(share)


def untrusted(predicted: float | None, measured: float | None) -> Iterator[Block]:
    """Warn if the predicted accuracy differs from the measured one by more than a factor of two."""
    if predicted is not None and measured is not None and abs(predicted - measured) > _DOUBLED:
        apart = f"The two differ by {abs(predicted - measured):.1f} dB"
        yield line(
            f"{apart}: the prediction assumes small, independent errors, which does not hold here. "
            "Trust the measured value.",
            style="yellow",
        )
