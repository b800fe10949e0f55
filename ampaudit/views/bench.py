"""Renders a benchmark: memory and speed relative to the first mode, with accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampaudit.core.text import format_bytes, format_number
from ampaudit.render.blocks import Rows, Section, facts, headline, line, tabulate
from ampaudit.render.view import Row, View, ViewPage
from ampaudit.report.bench import PARTS, BenchReport, BenchRow

BROKEN = "inf or NaN"
_STYLES = {BROKEN: "bold red", "not supported": "yellow", "out of memory": "yellow", "failed": "yellow"}


class BenchView(View[BenchReport]):
    """A row per mode and batch size."""

    about = "model.source"

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render the tables of each batch size and the modes that did not run; if quiet, the fastest mode."""
        report = self.document
        if verbosity < 0:
            yield Section(tuple(line(f"{self.name}: {text}") for text in _fastest(report)))
            return
        where = f"{report.device_name} ({report.device})"
        run = f"{report.steps} on {where}, median of {report.repeats}, modes in turns"
        yield headline(report.tool.version, f"{self.name}: {run}")
        yield from bench_tables(report)
        yield Section((facts(bench_facts(report)),))

    def digest(self) -> Iterator[Section]:
        """Render the measurements without the predictions."""
        report = self.document
        run = f": {report.steps} on {report.device_name}, median of {report.repeats}"
        yield Section((line((self.name, "code"), run),))
        yield from (table for table in bench_tables(report) if ":" not in str(table.title))

    def rows(self) -> Iterator[Row]:
        """Return a row per mode and batch size."""
        names = ("mode", "batch_size", "status", "seconds", "least", "most", "per_second", "peak_bytes")
        work = ("flops", "fast_share", "bytes_moved", "cast_bytes")
        for row in self.document.rows:
            yield {
                "device": self.document.device_name,
                "train": int(self.document.train),
                **{name: getattr(row, name) for name in (*names, "workspace_bytes", "sqnr_db", "at_best")},
                "finite": None if row.finite is None else int(row.finite),
                **{f"predicted_{name}": getattr(row.memory, name, None) for name in (*PARTS, "peak")},
                **{name: getattr(row.work, name, None) for name in work},
            }

    def page(self) -> ViewPage:
        """Return charts of memory and speed above the tables."""
        from ampaudit.views.figures import bench_data

        report = self.document
        values = {"report": report, "tables": bench_tables(report), "facts": list(bench_facts(report))}
        return ViewPage("bench.html.j2", ("values.js", "theme.js", "bench.js"), bench_data(report), values)


def _fastest(report: BenchReport) -> Iterator[str]:
    """Name the fastest mode for each batch size, compared with the first mode that ran."""
    for size in report.sizes:
        timed = [row for row in report.rows if row.batch_size == size and row.status == "ok" and row.seconds]
        if not timed:
            yield f"batch size {size}: no mode ran"
            continue
        base, best = timed[0], min(timed, key=lambda row: row.seconds or 0.0)
        step, speed, memory, share = (_cells(best, base)[index] for index in (0, 3, 4, 5))
        beside = f", {speed} as fast as {base.mode} with {share} of its memory" if best is not base else ""
        yield f"batch size {size}: {best.mode} is the fastest, {step} per step and {memory}{beside}"


def bench_tables(report: BenchReport) -> list[Section]:
    """Return, for each batch size, the cost of each mode, the predicted memory and the predicted work."""
    tables: list[Section] = []
    for size in report.sizes:
        rows = [row for row in report.rows if row.batch_size == size]
        tables.append(_costs(f"Batch size {size}", rows))
        if any(row.memory is not None for row in rows):
            tables.append(_split(f"Batch size {size}: predicted memory at the peak of a step", rows))
        if any(row.work is not None for row in rows):
            tables.append(_work(f"Batch size {size}: predicted work of a step", rows, report.target))
    if report.largest:
        largest = [(one.mode, f"{one.batch_size:,}", one.how) for one in report.largest]
        tables.append(_section("Largest batch that fits", ("mode", "batch size", "how"), largest))
    return tables


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    """Make a table, padding short rows."""
    styled = ([line(cell, style=_STYLES.get(cell, "")) for cell in row] for row in rows)
    padded: Rows = ((*row, *[""] * (len(heads) - len(row))) for row in styled)
    return Section((replace(tabulate(heads, padded), fold=False),), title)


def _base(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Return the first mode that ran, with which the others are compared."""
    return next((row for row in rows if row.status == "ok"), None)


def _costs(title: str, rows: Sequence[BenchRow]) -> Section:
    metric = ("metric",) if any(row.metric is not None for row in rows) else ()
    base = _base(rows)
    table = []
    for row in rows:
        cells = [row.status] if row.status != "ok" or base is None else _cells(row, base)
        table.append((row.mode, *cells, *([format_number(row.metric)] if row.metric is not None else [])))
    names = ("step", "spread", "samples/s", "speed", "memory", "of first", "accuracy")
    return _section(title, ("mode", *names, *metric), table)


def _cells(row: BenchRow, base: BenchRow) -> list[str]:
    assert row.seconds is not None
    assert row.least is not None
    assert row.most is not None
    speed = f"{base.seconds / row.seconds:.2f} x" if base.seconds else ""
    spread = f"{_milliseconds(row.least)} to {_milliseconds(row.most)}"
    share = f"{row.peak_bytes / base.peak_bytes:.0%}" if row.peak_bytes and base.peak_bytes else ""
    memory = format_bytes(row.peak_bytes) if row.peak_bytes else ""
    step = f"{_milliseconds(row.seconds)} ms"
    return [step, spread, format_number(row.per_second or 0.0), speed, memory, share, _accuracy(row)]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _accuracy(row: BenchRow) -> str:
    if row.finite is False:
        return BROKEN
    if row.mode == "fp32":
        return "reference"
    if row.problem:
        return "none"
    return "exact" if row.sqnr_db is None else f"{row.sqnr_db:.0f} dB"


def _split(title: str, rows: Sequence[BenchRow]) -> Section:
    workspace = ("workspace",) if any(row.workspace_bytes for row in rows) else ()
    table = []
    for row in rows:
        if row.memory is None:
            continue
        peak = row.memory.peak
        sizes = (format_bytes(part) if part else "" for part in (getattr(row.memory, p) for p in PARTS))
        ratio = f"{row.peak_bytes / peak:.0%}" if row.peak_bytes and peak else ""
        extra = (format_bytes(row.workspace_bytes) if row.workspace_bytes else "",) if workspace else ()
        table.append((row.mode, *sizes, format_bytes(peak), ratio, *extra))
    return _section(title, ("mode", *PARTS, "peak", "measured", *workspace), table)


def _work(title: str, rows: Sequence[BenchRow], target: str | None) -> Section:
    best = ("at best", "speed at best") if target is not None else ()
    base = next((row.at_best for row in rows if row.at_best is not None), None)
    table = []
    for row in rows:
        if row.work is None:
            continue
        work = row.work
        share = f"{work.cast_bytes / work.bytes_moved:.0%}" if work.bytes_moved else ""
        cells = [f"{work.flops / 1e9:,.3g}", f"{work.fast_share:.0%}", format_bytes(work.bytes_moved), share]
        if best and row.at_best is not None and base is not None:
            cells += [f"{_milliseconds(row.at_best)} ms", f"{base / row.at_best:.2f} x"]
        table.append((row.mode, *cells))
    return _section(title, ("mode", "GFLOP", "16 bits or TF32", "bytes moved", "by casts", *best), table)


def bench_facts(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Describe what each mode ran, why modes did not run, and what the numbers mean."""
    if report.inputs is not None and report.inputs.detail:
        yield "Inputs", report.inputs.detail
    yield from {row.mode: row.how for row in report.rows if row.how}.items()
    for row in report.rows:
        if row.note:
            yield row.mode, f"batch size {row.batch_size}, {row.status}: {row.note}"
        if row.problem:
            yield row.mode, f"batch size {row.batch_size}, no accuracy: {row.problem}"
    bases = [_base([row for row in report.rows if row.batch_size == size]) for size in report.sizes]
    first = " or ".join(dict.fromkeys(base.mode for base in bases if base is not None))
    if first:
        yield "Speed", f"in multiples of {first}; accuracy: signal-to-noise ratio of the outputs against fp32"
    yield (
        "Memory",
        "activations include casts of weights and temporaries; measured: peak relative to the prediction",
    )
    if any(row.workspace_bytes for row in report.rows):
        yield (
            "Workspace",
            "part of the measured peak that this CPU's kernels allocate internally: not predicted",
        )
    if report.interrupted:
        yield "Note", "interrupted: only finished measurements are shown"
    for note in report.notes:
        yield "Note", note
