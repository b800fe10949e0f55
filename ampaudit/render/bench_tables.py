"""The tables of a bench report, as texts: the same in a terminal, on a page and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampaudit.core.text import escape_control, format_bytes, format_number
from ampaudit.report.bench import PARTS, BenchReport, BenchRow

__all__ = ["BROKEN", "BenchTable", "bench_facts", "bench_tables", "row_name"]

BROKEN = "inf or NaN"


@dataclass(frozen=True, slots=True)
class BenchTable:
    """A title, heads, and rows of as many cells."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def row_name(report: BenchReport, row: BenchRow) -> str:
    """The mode, with the batch size where there are several."""
    several = len({one.batch_size for one in report.rows}) > 1
    return f"{row.mode}, {row.batch_size}" if several else row.mode


def bench_tables(report: BenchReport) -> list[BenchTable]:
    """Per batch size what each mode costs, the predicted split of memory, and the predicted work."""
    tables: list[BenchTable] = []
    for size in dict.fromkeys(row.batch_size for row in report.rows):
        rows = [row for row in report.rows if row.batch_size == size]
        tables.append(_costs(f"Batch size {size}", rows))
        if any(row.memory is not None for row in rows):
            tables.append(_split(f"Batch size {size}: predicted memory at the peak of a step", rows))
        if any(row.work is not None for row in rows):
            tables.append(_work(f"Batch size {size}: predicted work of a step", rows, report.target))
    if report.largest:
        rows_ = tuple((one.mode, f"{one.batch_size:,}", one.how) for one in report.largest)
        tables.append(BenchTable("Largest batch that fits", ("mode", "batch size", "how"), rows_))
    return tables


def _costs(title: str, rows: Sequence[BenchRow]) -> BenchTable:
    metric = any(row.metric is not None for row in rows)
    names = ("step", "spread", "samples/s", "speed", "memory", "of first", "accuracy")
    heads = ("mode", *names, *(("metric",) if metric else ()))
    base = next((row for row in rows if row.status == "ok"), None)
    made = []
    for row in rows:
        cells = [row.status] if row.status != "ok" or base is None else _cells(row, base)
        cells += [format_number(row.metric)] if row.metric is not None else []
        made.append((row.mode, *cells, *[""] * (len(heads) - 1 - len(cells))))
    return BenchTable(title, heads, tuple(made))


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
    return "exact" if row.sqnr_db is None else f"{row.sqnr_db:.0f} dB"


def _split(title: str, rows: Sequence[BenchRow]) -> BenchTable:
    made = []
    workspace = any(row.workspace_bytes for row in rows)
    for row in rows:
        if row.memory is None:
            continue
        parts = (getattr(row.memory, part) for part in PARTS)
        peak = row.memory.peak
        ratio = f"{row.peak_bytes / peak:.0%}" if row.peak_bytes and peak else ""
        sizes = (format_bytes(part) if part else "" for part in parts)
        own = (format_bytes(row.workspace_bytes) if row.workspace_bytes else "",) if workspace else ()
        made.append((row.mode, *sizes, format_bytes(peak), ratio, *own))
    heads = ("mode", *PARTS, "peak", "measured", *(("workspace",) if workspace else ()))
    return BenchTable(title, heads, tuple(made))


def _work(title: str, rows: Sequence[BenchRow], target: str | None) -> BenchTable:
    best = ("at best", "speed at best") if target is not None else ()
    base = next((row.at_best for row in rows if row.at_best is not None), None)
    made = []
    for row in rows:
        if row.work is None:
            continue
        work = row.work
        share = f"{work.cast_bytes / work.bytes_moved:.0%}" if work.bytes_moved else ""
        cells = [f"{work.flops / 1e9:,.3g}", f"{work.fast_share:.0%}", format_bytes(work.bytes_moved), share]
        if best and row.at_best is not None and base is not None:
            cells += [f"{_milliseconds(row.at_best)} ms", f"{base / row.at_best:.2f} x"]
        made.append((row.mode, *cells, *[""] * (4 + len(best) - len(cells))))
    return BenchTable(
        title, ("mode", "GFLOP", "16 bits or TF32", "bytes moved", "by casts", *best), tuple(made)
    )


def bench_facts(report: BenchReport) -> Iterable[tuple[str, str]]:
    """What each mode ran, what did not run and why, and what the numbers mean."""
    seen = {row.mode: row.how for row in report.rows if row.how}
    yield from seen.items()
    for row in report.rows:
        if row.note:
            yield row.mode, f"batch size {row.batch_size}, {row.status}: {escape_control(row.note)}"
    first = report.rows[0].mode if report.rows else ""
    yield "Speed", f"in multiples of {first}; accuracy: signal to error of the outputs against fp32"
    yield (
        "Memory",
        "activations: all that is not named, casts of weights and temporaries, too; measured: of the peak",
    )
    if any(row.workspace_bytes for row in report.rows):
        yield (
            "Workspace",
            "part of the measured peak that kernels of this CPU took for themselves: not predicted",
        )
    if report.interrupted:
        yield "Note", "interrupted: what was finished is here"
    for note in report.notes:
        yield "Note", escape_control(note)
