"""Renders the tables of a scan: sites near the limit, other formats, all sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import PurePath

from markupsafe import Markup

from ampaudit.core.formats import format_named
from ampaudit.core.text import (
    escape_control,
    format_bound,
    format_bytes,
    format_number,
    format_power,
    format_scale,
    listed,
    plural,
    shell_quoted,
)
from ampaudit.policy.schema import AS_IS
from ampaudit.render.blocks import Block, Line, Section, Table, facts, line, tabulate
from ampaudit.render.findings import TOP
from ampaudit.report.extrapolation import Proofs, SizeGrowth, Sweep
from ampaudit.report.gradients import BackwardReport, ScaleAdvice
from ampaudit.report.model import AgainstReport, OutputAccuracy, Report, SiteReport
from ampaudit.report.steps import StepGrowth, StepReport, StepsReport

_ROWS = 8
_NUMBERS = 6  # step numbers listed in a sentence
_LINE = 14  # height of a text in the chart
_MAX_TRACES = 3  # the first step, later ones, and those whose state has other dtypes
_STEPS_WIDTH, _STEPS_HEIGHT, _LEFT, _TOP = 380, 110, 36, 12
_SWEEP_WIDTH, _HEIGHT, _MARGIN = 560, 150, 30
_STYLES = {"pass": "bold green", "fail": "bold red", "not run": "bold yellow"}
_VERBS = (("pass", "passes", "pass"), ("fail", "fails", "fail"), ("not run", "was not run", "were not run"))
_EVERY = 2  # step between the exponents in the table of scales; the JSON report has all
_BAR = 20
_OUTPUTS = 4
_SHOWN = 5
_WIDTH = 36


def level_sections(report: Report, count: int) -> Iterator[Section]:
    """Render the tables for the level of the report, with about ``count`` sites each."""
    if report.run.level == "ranges":
        yield from _what_if(report, count)
    elif report.run.level == "static":
        yield from _unproved(report, 2 * count)
    else:
        yield from path_sections(report, 2 * count)
        yield from _promoted(report, count)
        yield from _changed(report, 2 * count)
        yield from _nearest(report, count)


def _nearest(report: Report, count: int) -> Iterator[Section]:
    """Render the healthy sites with the least headroom."""
    sites = report.nearest_sites
    if not sites:
        return
    rows = []
    has_batches = any(site.forward is not None and site.forward.batch for site in sites)
    for site in sites[:count]:
        assert site.forward is not None
        sqnr = site.forward.sqnr_db
        bound = format_bound(site.bound) if site.verdict == "proved" and site.bound is not None else "no"
        rows.append(
            (
                site.site,
                format_number(site.forward.peak),
                f"{site.headroom_bits:.1f} bits",
                "exact" if sqnr is None else f"{sqnr:.0f} dB",
                *((site.forward.batch or "",) if has_batches else ()),
                *((bound,) if report.proofs else ()),
            )
        )
    heads = ("site", "peak", "headroom", "accuracy", *(("peak in",) if has_batches else ()))
    heads += ("proved bound",) if report.proofs else ()
    title = f"Nearest the limit, of {plural(len(sites), 'healthy site')} in {report.run.dtype}"
    yield Section((tabulate(heads, rows, width=_WIDTH),), title)


def _unproved(report: Report, count: int) -> Iterator[Section]:
    """Render unproved sites in graph order, since the first ones affect those after them."""
    sites = [s for s in report.sites if s.verdict != "proved"]
    if not sites:
        return
    rows = (
        (site.site, "unbounded" if site.bound is None else format_bound(site.bound)) for site in sites[:count]
    )
    more = "; the first" if len(sites) > count else ""
    table = tabulate(("site", "bound"), rows, width=_WIDTH)
    yield Section((table,), f"Not proved: {plural(len(sites), 'site')}{more}")


def _changed(report: Report, count: int) -> Iterator[Section]:
    """Render verdicts that differ from those under the default execution contract."""
    if not report.changed:
        return
    rows = ((change.site, change.usual, change.here) for change in report.changed[:count])
    table = tabulate(("site", "usual", "here"), rows, left=("usual", "here"), width=_WIDTH)
    title = f"Verdicts that differ from the default contract: {plural(len(report.changed), 'site')}"
    yield Section((table,), title)


def _promoted(report: Report, count: int) -> Iterator[Section]:
    """Render the sites that are promoted to float32 because of their values."""
    promoted = set(report.promoted)
    sites = [s for s in report.sites if s.site in promoted]
    if not sites:
        return
    limit = format_named(report.run.dtype).max
    over = sum(s.forward is not None and s.forward.peak > limit for s in sites)
    beyond = f"; {over} of them exceed {format_number(limit)}" if over else ""
    rows = []
    for site in sorted(sites, key=lambda s: s.forward.peak if s.forward else 0.0, reverse=True)[:count]:
        bits = f"{site.headroom_bits:+.1f} bits" if site.headroom_bits is not None else ""
        peak = format_number(site.forward.peak) if site.forward else ""
        rows.append((site.site, peak, bits, site.rule or ""))
    heads = ("site", "peak", "headroom", "rule")
    blocks: list[Block] = [tabulate(heads, rows, left=("rule",), width=_WIDTH)]
    if len(sites) > count:
        more = f"and {len(sites) - count} more; -v lists every site with its rule"
        blocks.append(line(more, style="dim"))
    title = f"Promoted to float32 because of their values: {plural(len(sites), 'site')}{beyond}"
    yield Section(tuple(blocks), title)


def path_sections(report: Report, count: int) -> Iterator[Section]:
    """Render the lines that branch on tensor values; those that would branch differently first."""
    if report.path is None or not report.path.lines:
        return
    dtype, lines = report.run.dtype, sorted(report.path.lines, key=lambda read: not read.differing)
    rows = []
    for read in lines[:count]:
        place = read.source.user_line if read.source is not None else None
        where = f"{PurePath(place.file).name}:{place.line}" if place is not None else read.layer or "(top)"
        decides = "the same way" if not read.differing else f"differently, {read.differing} of {read.reads}"
        decides = {"array": "values leave torch", "number": "follows FP32's number"}.get(read.kind, decides)
        rows.append((where, read.name, f"{read.reads:,}", read.fp32, read.low, decides))
    heads = ("line", "reads by", "times", "FP32", dtype, "decides in 16 bits")
    blocks: list[Block] = [tabulate(heads, rows, left=("reads by", "decides in 16 bits"))]
    if len(lines) > count:
        blocks.append(line(f"and {len(lines) - count} more lines", style="dim"))
    paths = "" if report.path.count == 1 else f", which take {report.path.count} paths"
    yield Section(tuple(blocks), f"Decided by values: the audit follows FP32 on these inputs{paths}")


def _what_if(report: Report, count: int) -> Iterator[Section]:
    """Compare FP32 values with every format, for ``--ranges``."""
    sites = [s for s in report.sites if s.what_if is not None and not s.by_design]
    what = (
        "sites that overflow, sites that lose over 1 % of their values to zero, the least headroom; "
        "without masks and constants"
    )
    title = f"What if: FP32 values of {len(sites)} sites against each format"
    yield Section((line(what, style="dim"), _format_table(sites)), title)
    measured = [s for s in sites if s.headroom_bits is not None]
    rows = [
        (
            site.site,
            format_number(site.forward.peak if site.forward else 0.0),
            f"{site.headroom_bits:+.1f} bits",
        )
        for site in sorted(measured, key=lambda s: s.headroom_bits or 0.0)[:count]
    ]
    if rows:
        title = f"Largest values, with headroom in {report.run.dtype}"
        yield Section((tabulate(("site", "peak", "headroom"), rows),), title)


def _format_table(sites: list[SiteReport]) -> Table:
    rows = []
    for name in sites[0].what_if or {} if sites else {}:
        cases = [(s, s.what_if[name]) for s in sites if s.what_if is not None]
        over = sum(case.overflows for _, case in cases)
        vanish = sum(case.vanish > 0.01 for _, case in cases)
        bits = [(case.headroom_bits, s.site) for s, case in cases if case.headroom_bits is not None]
        least, where = min(bits, default=(0.0, ""))
        rows.append((name, str(over), str(vanish), f"{least:.1f} bits", where))
    return tabulate(("format", "overflow", "vanish", "headroom", "least at"), rows, left=("least at",))


def all_sites(report: Report) -> Section:
    """Render every floating-point site, for ``-v``."""
    rows = []
    for site in report.sites:
        forward = site.forward
        cells = (
            site.site,
            site.precision,
            format_number(forward.peak) if forward else "",
            f"{forward.headroom_bits:.1f}" if forward and forward.headroom_bits is not None else "",
            f"{forward.sqnr_db:.0f}" if forward and forward.sqnr_db is not None else "",
            f"{forward.local_sqnr_db:.0f}" if forward and forward.local_sqnr_db is not None else "",
            site.rule or site.role,
        )
        rows.append(cells)
    heads = ("site", "precision", "peak", "headroom", "accuracy", "alone", "rule")
    return Section((tabulate(heads, rows, left=("rule",)),), "All sites")


def summary_rows(report: Report, hidden: int, *, full: bool = True) -> Iterator[tuple[str, str]]:
    """Yield pairs of a label and a text.

    Args:
        report: Report of a scan.
        hidden: Number of notes that are not shown.
        full: Whether to include complete coverage and the default contract.
    """
    cover, run = report.coverage, report.run
    if run.inputs is not None and run.inputs.detail:
        yield "Inputs", run.inputs.detail
    if run.level != "static" and (full or report.gaps or cover.audited < cover.sites):
        measured = f"({cover.measured} measured, the others pass values on)"
        gaps = f"{plural(len(report.gaps), 'gap')}; "
        gaps += f"no rule mentions {plural(cover.no_rule, 'site')}"
        yield "Coverage", f"{cover.audited} of {cover.sites} floating-point sites audited {measured}; {gaps}"
    if report.proofs is not None:
        yield from _proofs(report, report.proofs)
    yield from _beyond_the_batches(report)
    if run.level == "scan":
        yield from _run(report, full=full)
    limits = format_named(run.dtype)
    smallest = f"smallest normal {limits.min_normal:.3g}"
    yield "Limits", f"{limits.name} ends at {format_number(limits.max)}, {smallest}"
    for note in report.notes:
        yield "Note", note
    if hidden:
        yield "Notes", f"{plural(hidden, 'more finding')} of severity note; -v shows them"
    if report.timings:
        yield "Time", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.timings.items())


def _run(report: Report, *, full: bool) -> Iterator[tuple[str, str]]:
    cover, dtype = report.coverage, report.run.dtype
    regions = (
        f"; {plural(cover.author_sites, 'site')} in autocast(enabled=False) regions of the code"
        if cover.author_sites
        else ""
    )
    casts, conversions = plural(cover.casts, "cast"), plural(cover.author_casts, "conversion")
    casts = f"{casts} inserted, {conversions} in the model's code{regions}"
    yield "Precision", f"{plural(len(report.low_precision_sites), 'site')} in {dtype}; {casts}"
    accuracies = listed(list(map(_accuracy, report.worst_outputs_first)), _OUTPUTS)
    yield "Outputs", f"signal-to-noise ratio against FP32: {accuracies}"
    yield "Weights", weights_in_words(report)
    backend = report.run.backend  # named after the contract, unless that is the default
    if backend != "native" and (full or backend != "emulated"):
        yield "Contract", report.run.contract


def _proofs(report: Report, proofs: Proofs) -> Iterator[tuple[str, str]]:
    over = sum(site.verdict == "overflows" for site in report.sites)
    ranges = ", ".join(
        f"{a.name} in {format_number(a.low)}:{format_number(a.high)} ({a.source})" for a in proofs.assumed
    )
    where = " along the path of these inputs" if report.path is not None else ""
    ran = report.run.level != "static" and proofs.proved < proofs.sites
    others = f"; of the others, {over or 'none'} overflowed in what was run" if ran else ""
    yield "Proofs", f"{proofs.proved} of {proofs.sites} sites proved{where}{others}"
    yield "Assumed", f"{ranges or 'nothing about inputs'}; {proofs.contract}"
    if proofs.uncovered_ops:
        yield "Unbounded", f"ops that no proof covers: {', '.join(proofs.uncovered_ops)}"


def _beyond_the_batches(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the results for other inputs: searches and tail estimates."""
    for s in report.stressed:
        outcome = f"overflows: --inputs {shell_quoted(s.file or '')}" if s.overflows else "no overflow found"
        reached = f"peak increased from {format_number(s.seen)} to {format_number(s.reached)}"
        yield "Stress", f"{s.site}: {reached}; {outcome}"
    for t in report.tails:
        low, rate, high = (_rate(number) for number in (t.low, t.per_million, t.high))
        interval = f"90 %: {low} to {high}, from {t.batches} batches"
        yield "Tail", f"{t.site}: expected overflows per million samples: {rate} ({interval})"


def _rate(per_million: float) -> str:
    return "0" if per_million == 0 else "under 0.001" if per_million < 1e-3 else format_number(per_million)


def weights_in_words(report: Report) -> str:
    """Return the sizes of the weights, as they are stored or with the copies that the policy makes."""
    masters, copies = format_bytes(report.weights.master_bytes), format_bytes(report.weights.working_bytes)
    kind = "in 16 bits" if report.run.policy == AS_IS else "of 16-bit copies"
    return f"{masters} in FP32, {copies} {kind}"


def _accuracy(output: OutputAccuracy) -> str:
    repaired = " with FP32's values where it breaks" if output.repaired else ""
    return f"{output.name} {output.in_words}{repaired}"


def against_sections(against: AgainstReport, *, full: bool = False) -> Iterator[Section]:
    """Render the ops that only one model has; with ``full``, also each matched pair."""
    rows = [
        ("only here", _listed(against.only_here, full=full)),
        (f"only in {against.reference}", _listed(against.only_reference, full=full)),
    ]
    text = [line((f"{label}: ", "bold"), sites) for label, sites in rows if sites]
    yield Section((line(against.extent), *text), f"Against {against.reference}")
    if full and against.matched:
        pairs: list[list[str | Line]] = [
            [line((pair.site, "code")), line((pair.counterpart, "code"))] for pair in against.matched
        ]
        yield Section((tabulate(("op", "counterpart"), pairs, left=("op", "counterpart")),))


def _listed(sites: Sequence[str], *, full: bool) -> str:
    return listed(sites, len(sites) if full else _SHOWN)


def sweep_words(sweep: Sweep) -> str:
    """Summarize the verdicts: ``length 64, 256 pass, and 21840 would overflow (extrapolated)``."""
    clauses = []
    for verdict, one, several in _VERBS:
        values = [str(size.value) for size in sweep.values if size.verdict == verdict]
        if values:
            clauses.append(f"{', '.join(values)} {one if len(values) == 1 else several}")
    ahead = "" if sweep.soonest is None else f", and {sweep.soonest.crossing} would overflow (extrapolated)"
    return f"{sweep.axis} {', '.join(clauses)}{ahead}"


def sweep_sections(sweep: Sweep, *, full: bool = True) -> Iterator[Section]:
    """Render one row per size, then one per site that overflows at some size."""
    rows: list[list[str | Line]] = []
    for size in sweep.values:
        bits = "" if size.headroom_bits is None else f"{size.headroom_bits:.1f} bits"
        word = line((size.verdict.upper(), _STYLES[size.verdict]))
        breaks = str(size.errors) if size.errors else ""
        rows.append([f"{size.value:,}", word, breaks, bits, size.nearest or "", size.output])
    table = tabulate((sweep.axis, "", "breaks", "least headroom", "at", "output"), rows, left=("", "at"))
    missed = [size for size in sweep.values if size.verdict == "not run"]
    remarks = [line(f"{size.value:,} was not run: {size.problem}") for size in missed]
    if len(sweep.values) - len(missed) > 1:
        remarks.append(line(f"The rest of this report is about {sweep.axis} {sweep.shown:,}."))
    yield Section((table, *remarks), f"Sweep over {sweep.axis}")
    if sweep.growth:
        growth = sweep.growth if full else sweep.growth[:_SHOWN]
        heads = ("site", f"overflows at {sweep.axis}", "between", "peak grows", "")
        rows = [_growth_cells(site, sweep.axis) for site in growth]
        yield Section((tabulate(heads, rows, left=("peak grows", "")),), "Growth with size")


def _growth_cells(growth: SizeGrowth, axis: str) -> list[str | Line]:
    high = "?" if growth.high is None else f"{growth.high:,}"
    sizes = sum(peak is not None for peak in growth.peaks)
    form = {
        "power": f"as {axis}^{growth.exponent or 0:.2f}",
        "linear": "linearly",
        "logarithmic": "as a logarithm",
    }
    fit = f"{form[growth.form]}, R^2 {growth.r_squared:.4f} of {sizes} sizes"
    how = ("extrapolated", "yellow") if growth.extrapolated else ("between sizes that were run", "")
    how = ("the policy keeps it in float32 there", "") if growth.promoted else how
    return [
        growth.site,
        f"{growth.crossing:,}",
        f"{growth.low:,} and {high}",
        fit,
        line(how),
    ]


def sweep_chart(sweep: Sweep) -> Markup:
    """Draw the least headroom over the size, both in log2, as SVG; empty for fewer than two points."""
    points = [(size.value, size.headroom_bits) for size in sweep.values if size.headroom_bits is not None]
    if len(points) < 2:
        return Markup("")
    ahead = sweep.soonest
    ends = [*points, *([] if ahead is None else [(ahead.crossing, 0.0)])]
    start, right = (math.log2(ends[index][0]) for index in (0, -1))
    top, bottom = max(*(bits for _, bits in points), 1.0), min(*(bits for _, bits in points), 0.0)

    def at(value: float, bits: float) -> tuple[float, float]:
        x = _MARGIN + (math.log2(value) - start) / ((right - start) or 1.0) * (_SWEEP_WIDTH - 2 * _MARGIN)
        y = _MARGIN / 2 + (top - bits) / (top - bottom) * (_HEIGHT - 1.5 * _MARGIN)
        return round(x, 1), round(y, 1)

    def path(style: str, *corners: tuple[float, float]) -> str:
        joined = " ".join(f"{x},{y}" for x, y in corners)
        return f'<polyline points="{joined}" fill="none" {style}/>'

    solid = 'stroke="var(--lower)" stroke-width="2"'
    parts = [path('stroke="var(--bad)"', at(points[0][0], 0.0), at(ends[-1][0], 0.0))]
    parts.append(path(f'{solid} stroke-dasharray="5 4"', *(at(*point) for point in ends[-2:])))
    parts.append(path(solid, *(at(*point) for point in points)))
    for value, bits in points:
        x, y = at(value, bits)
        color = "var(--broken)" if bits < 0 else "var(--lower)"
        title = f"<title>{value:,}: {bits:.1f} bits</title>"
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}">{title}</circle>')
    label = f'y="{_HEIGHT - 2}" text-anchor="middle" font-size="11" fill="var(--soft)"'
    parts += [f'<text x="{at(value, 0.0)[0]}" {label}>{value:,}</text>' for value, _ in ends]
    caption = f"Least headroom in bits over {sweep.axis}; below the line, values overflow."
    caption += "" if ahead is None else " Dashed: extrapolated."
    return Markup(
        '<figure><figcaption>{said}</figcaption><svg role="img" aria-label="{said}" viewBox="0 0 {width} '
        '{height}" style="width:100%;max-width:{width}px">{parts}</svg></figure>'
    ).format(said=escape_control(caption), width=_SWEEP_WIDTH, height=_HEIGHT, parts=Markup("".join(parts)))


def gradient_sections(backward: BackwardReport, dtype: str, count: int, *, full: bool) -> Iterator[Section]:
    """Render losses, suitable scales, the table of scales, and the layers that limit them."""
    yield Section((facts(_summary(backward, dtype)),), "Gradients")
    advice = backward.advice
    if advice is not None:
        yield _scales(advice, dtype, 1 if full else _EVERY)
        yield _layers(advice, len(advice.layers) if full else count)


def _summary(backward: BackwardReport, dtype: str) -> Iterator[tuple[str, str]]:
    yield "Loss", _losses(backward, dtype)
    kind = "dynamic" if backward.dynamic else "fixed"
    yield "Scale", f"{format_scale(backward.loss_scale)}, {kind} ({backward.scale_from})"
    for number, text in enumerate(_window(backward)):
        yield "" if number else "Window", text
    if backward.frozen:
        count = len(backward.frozen)
        yield "Frozen", f"{plural(count, 'parameter')} {'requires' if count == 1 else 'require'} no gradient"
    for note in backward.notes:
        yield "Note", note


def scales_that_suit(backward: BackwardReport) -> str:
    """Summarize the suitable scales in one line."""
    advice = backward.advice
    if advice is None:
        return "no gradient is held in 16 bits"
    if not advice.exists:
        low, high = _ends(advice)
        return f"no loss scale suits every layer: none fits both {high} and {low}"
    return f"loss scales from 2^{advice.low} to 2^{advice.high} suit every layer{_choice(backward, advice)}"


def _choice(backward: BackwardReport, advice: ScaleAdvice) -> str:
    """Return which of the suitable scales to use; empty if none is needed."""
    if advice.high < 0:
        return "; all are below 1"
    return f"; use {format_power(backward.suggested)}" if backward.suggested is not None else ""


def _ends(advice: ScaleAdvice) -> tuple[str, str]:
    """Return the layers that limit the scale from below and from above."""
    return advice.low_at or TOP, advice.high_at or TOP


def _losses(backward: BackwardReport, dtype: str) -> str:
    if not backward.losses:
        return "none"
    first = backward.losses[0]
    values = [
        f"{format_number(value)} in {name}" if value is not None else f"not finite in {name}"
        for value, name in ((first.float32, "FP32"), (first.lower, dtype))
    ]
    if first.repaired is not None:
        values.append(
            f"{format_number(first.repaired)} with FP32's values where it breaks, as for the gradients"
        )
    more = f" (first of {len(backward.losses)} batches)" if len(backward.losses) > 1 else ""
    return f"{', '.join(values)}{more}"


def _window(backward: BackwardReport) -> Iterator[str]:
    advice = backward.advice
    if advice is None:
        yield "any: no gradient is held in 16 bits"
        return
    low, high = _ends(advice)
    share = f"no more than {advice.share:.0%} of a layer's gradient"
    if not advice.exists:
        over = f"{high} overflows above 2^{advice.high}"
        yield f"no single scale: {over}, {low} needs 2^{advice.low} to lose {share}"
        return
    fits = f"2^{advice.low} to 2^{advice.high}: nothing overflows"
    yield f"{fits}, and {share} is flushed to zero{_choice(backward, advice)}"
    yield f"the lower end is set by {low}, the upper by {high}"


def _scales(advice: ScaleAdvice, dtype: str, every: int) -> Section:
    rows = [
        (
            f"2^{row.exponent}",
            f"{row.flushed:.2%}",
            "#" * round(row.flushed * _BAR),
            str(row.overflowing) if row.overflowing else "",
            "in the window" if advice.low <= row.exponent <= advice.high else "",
        )
        for row in advice.rows[::every]
    ]
    table = tabulate(("scale", "flushed to zero", "", "overflow", ""), rows, left=("",))
    return Section((table,), f"What each scale would do to the {dtype} gradients")


def _layers(advice: ScaleAdvice, count: int) -> Section:
    rows = [
        (
            layer.layer or TOP,
            format_number(layer.peak),
            f"{layer.flushed:.2%}",
            f"2^{layer.low} to 2^{layer.high}" if layer.low <= layer.high else "none",
            layer.high_at,
        )
        for layer in sorted(advice.layers, key=lambda layer: layer.high - layer.low)[:count]
    ]
    heads = ("layer", "largest", "flushed", "window", "overflows first")
    table = tabulate(heads, rows, left=("overflows first",))
    return Section((table,), f"Layers with the least room, of {len(advice.layers)}")


def step_section(steps: StepsReport, *, full: bool = False) -> Section:
    """Render a table of all or the most telling steps, and sentences about them."""
    visible = steps.steps if full else _most_telling(steps.steps)
    rows = (
        (
            str(step.step),
            _steps_accuracy(step),
            "" if step.headroom_bits is None else f"{step.headroom_bits:.1f} bits",
            step.headroom_at,
            _events(step),
        )
        for step in visible
    )
    heads = ("step", "accuracy", "headroom", "at", "")
    table = tabulate(heads, rows, left=("at", ""))
    more = "" if len(visible) == len(steps.steps) else f", {len(visible)} of {len(steps.steps)}; -v shows all"
    sentences = (line(sentence) for sentence in step_sentences(steps))
    return Section((table, *sentences), f"Steps{more}")


def _most_telling(rows: Sequence[StepReport]) -> tuple[StepReport, ...]:
    """Select the first, last and worst steps, the first one with each event, and some in between."""
    events: tuple[Callable[[StepReport], bool], ...] = (
        lambda step: step.broken,
        lambda step: bool(step.flipped),
        lambda step: step.poisoned,
    )
    indices = {round(index * (len(rows) - 1) / (_ROWS - 1)) for index in range(_ROWS)} if rows else set()
    for happens in events:
        indices |= {next((index for index, step in enumerate(rows) if happens(step)), 0)}
    for figures in ([step.accuracy_db for step in rows], [step.headroom_bits for step in rows]):
        measured = [(figure, index) for index, figure in enumerate(figures) if figure is not None]
        indices |= {min(measured)[1]} if measured else set()
    return tuple(step for index, step in enumerate(rows) if index in indices)


def _steps_accuracy(step: StepReport) -> str:
    if step.accuracy_db is not None:
        return f"{step.accuracy_db:.0f} dB"
    return "wrong" if step.output else "exact"


def _events(step: StepReport) -> str:
    events = []
    if step.origins:
        more = f" and {len(step.origins) - 1} more" if len(step.origins) > 1 else ""
        events.append(f"{step.origins[0]}{more} out of range")
    if step.broken_inputs:
        events.append(f"next {', '.join(step.broken_inputs)} out of range")
    if step.flipped:
        events.append(f"another {', '.join(step.flipped)} in 16 bits")
    if step.poisoned:
        events.append("poisoned")
    return "; ".join(events)


def step_sentences(steps: StepsReport) -> Iterator[str]:
    """Describe when values leave the range, what grows, and where the 16-bit run would choose differently."""
    first, poisoned, flipped = steps.first_broken, steps.poisoned, steps.flipped
    if steps.fed_back:
        yield f"Fed back: {steps.fed_back}."
    if first is not None:
        what = (*first.origins, *(f"next_inputs: {name}" for name in first.broken_inputs))
        more = f" and {len(what) - 1} more" if len(what) > 1 else ""
        yield f"The first step out of range is {first.step}: {what[0]}{more}."
        if poisoned:
            yield f"If nothing is repaired, it poisons {_steps(poisoned)}."
        yield "After it, broken values are replaced by FP32's, within the range of the format."
    for growth in steps.growth:
        yield _growth(growth, len(steps.steps))
    if flipped:
        names = ", ".join(dict.fromkeys(n for step in steps.steps for n in step.flipped))
        choice = f"The 16-bit run would choose another {names} after {_steps(flipped)}"
        yield f"{choice}; both runs go on with FP32's."
    if steps.traces > _MAX_TRACES:
        yield (
            f"The model was traced {steps.traces} times, since the shapes or Python values of its inputs "
            "change from step to step; tensors of a fixed size are faster."
        )


def _growth(growth: StepGrowth, count: int) -> str:
    every = f"doubles every {format_number(growth.doubles_every)} steps"
    what = f"error of {growth.name}" if growth.what == "error" else f"largest value, at {growth.name},"
    sentence = f"The {what} {every}"
    if growth.reaches is None or growth.reaches <= count:
        return f"{sentence}."
    end = "lost its required accuracy" if growth.what == "error" else "left the range"
    return f"{sentence}: at this rate it will have {end} at about step {growth.reaches}."


def _steps(numbers: Sequence[int]) -> str:
    """Format step numbers: ``step 12``, ``steps 3, 9 and 14``, ``steps 41 to 50``, or the first of many."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    listed = ", ".join(map(str, numbers[: _NUMBERS - 1]))
    if len(numbers) >= _NUMBERS:
        return f"{plural(len(numbers), 'step')} ({listed} ...)"
    return f"steps {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def steps_svg(steps: StepsReport) -> str:
    """Return static SVG charts of headroom and accuracy over the steps."""
    headroom = [(step.step, step.headroom_bits) for step in steps.steps if step.headroom_bits is not None]
    accuracy = [(step.step, step.accuracy_db) for step in steps.steps if step.accuracy_db is not None]
    broken = {step.step for step in steps.steps if step.broken}
    last = steps.steps[-1].step if steps.steps else 1
    charts = ((headroom, "Headroom in bits", "--lower"), (accuracy, "Accuracy in dB", "--gradient"))
    return "".join(
        _panel(points, last, broken, label, color) for points, label, color in charts if len(points) > 1
    )


def _panel(points: Sequence[tuple[int, float]], last: int, broken: set[int], label: str, color: str) -> str:
    values = [value for _, value in points]
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else low + 1.0

    def x(step: int) -> float:
        return _LEFT + (_STEPS_WIDTH - _LEFT - 8) * (step - 1) / max(last - 1, 1)

    def y(value: float) -> float:
        return _TOP + (_STEPS_HEIGHT - 2 * _TOP) * (high - value) / (high - low)

    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    marks = "".join(
        f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5" fill="var(--broken)">'
        f"<title>step {step} leaves the range</title></circle>"
        for step, value in points
        if step in broken
    )
    ticks = (high, *((0.0,) if low < 0.0 < high and y(0.0) - y(high) > _LINE < y(low) - y(0.0) else ()), low)
    texts = "".join(
        f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0f}</text>'
        for value in ticks
    )
    caption = escape(f"{label} over {plural(last, 'step')}: from {values[0]:.1f} to {values[-1]:.1f}")
    return (
        f'<figure class="steps"><figcaption>{escape(label)}</figcaption>'
        f'<svg role="img" aria-label="{caption}" viewBox="0 0 {_STEPS_WIDTH} {_STEPS_HEIGHT + 14}"'
        f' width="100%">'
        f'<line x1="{_LEFT}" x2="{_STEPS_WIDTH - 8}" y1="{y(0.0):.1f}" y2="{y(0.0):.1f}"'
        f' stroke="var(--line)"/>'
        f'{texts}<text x="{_LEFT}" y="{_STEPS_HEIGHT + 10}">1</text>'
        f'<text x="{_STEPS_WIDTH - 8}" y="{_STEPS_HEIGHT + 10}" text-anchor="end">step {last}</text>'
        f'<polyline points="{path}" fill="none" stroke="var({color})" stroke-width="2"/>{marks}'
        "</svg></figure>"
    )
