"""The table of modes for people: memory and speed against the first one, accuracy beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.report.bench import BenchReport, BenchRow
from ampaudit.report.grid import labelled, open_table
from ampaudit.words import number, plain, size_of

__all__ = ["render_bench"]


def render_bench(report: BenchReport) -> RenderableType:
    """A table per batch size, the split of memory, and what did not run."""
    kind = "training steps" if report.train else "forward passes"
    head = Text.assemble(
        ("ampaudit ", "bold"),
        (report.tool.version, "bold"),
        f"  {plain(report.model.source)}: {kind} on {plain(report.device_name)} ({report.device}), "
        f"median of {report.repeats}, modes in turns",
    )
    parts: list[RenderableType] = [head]
    for size in dict.fromkeys(row.batch_size for row in report.rows):
        rows = [row for row in report.rows if row.batch_size == size]
        parts += [Text(), Text(f"Batch size {size}", "bold"), _costs(rows)]
        if any(row.memory is not None for row in rows):
            parts += [Text(), Text("Predicted memory at the peak of a step", "bold"), _split(rows)]
        if any(row.work is not None for row in rows):
            parts += [Text(), Text("Predicted work of a step", "bold"), _work(rows, report.target)]
    if report.largest:
        parts += [Text(), Text("Largest batch that fits", "bold")]
        parts.append(labelled((one.mode, f"{one.batch_size:,} ({one.how})") for one in report.largest))
    parts += [Text(), labelled(_summary(report))]
    return Group(*parts)


def _costs(rows: Sequence[BenchRow]) -> RenderableType:
    metric = any(row.metric is not None for row in rows)
    heads = ("mode", "step", "spread", "samples/s", "speed", "memory", "of first", "accuracy")
    table = open_table(*heads, *(("metric",) if metric else ()))
    base = next((row for row in rows if row.status == "ok"), None)
    for row in rows:
        if row.status != "ok" or base is None:
            table.add_row(row.mode, Text(row.status, "yellow"))
            continue
        found: list[str | Text] = [*_time(row, base), *_memory(row, base), _accuracy(row)]
        table.add_row(row.mode, *found, *((number(row.metric),) if metric and row.metric is not None else ()))
    return table


def _time(row: BenchRow, base: BenchRow) -> list[str]:
    if row.seconds is None or row.least is None or row.most is None:
        return ["", "", "", ""]
    ratio = f"{base.seconds / row.seconds:.2f} x" if base.seconds else ""
    spread = f"{_milliseconds(row.least)} to {_milliseconds(row.most)}"
    return [f"{_milliseconds(row.seconds)} ms", spread, number(row.per_second or 0.0), ratio]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _memory(row: BenchRow, base: BenchRow) -> list[str]:
    if row.peak_bytes is None:
        return ["", ""]
    share = f"{row.peak_bytes / base.peak_bytes:.0%}" if base.peak_bytes else ""
    return [size_of(row.peak_bytes), share]


def _accuracy(row: BenchRow) -> Text:
    if row.finite is False:
        return Text("inf or NaN", "bold red")
    if row.mode == "fp32":
        return Text("reference")
    return Text("exact" if row.sqnr_db is None else f"{row.sqnr_db:.0f} dB")


def _split(rows: Sequence[BenchRow]) -> RenderableType:
    heads = ("mode", "weights", "masters", "gradients", "optimizer", "activations", "peak", "measured is")
    table = open_table(*heads)
    for row in rows:
        if row.memory is None:
            continue
        memory = row.memory
        parts = (memory.weights, memory.masters, memory.gradients, memory.optimizer, memory.activations)
        ratio = f"{row.peak_bytes / memory.peak:.0%} of it" if row.peak_bytes and memory.peak else ""
        table.add_row(
            row.mode, *(size_of(part) if part else "" for part in parts), size_of(memory.peak), ratio
        )
    return table


def _work(rows: Sequence[BenchRow], target: str | None) -> RenderableType:
    best = ("at best", "speed at best") if target is not None else ()
    table = open_table("mode", "GFLOP", "16 bits or TF32", "bytes moved", "by casts", *best)
    base = next((row.at_best for row in rows if row.at_best is not None), None)
    for row in rows:
        if row.work is None:
            continue
        work = row.work
        share = f"{work.cast_bytes / work.bytes_moved:.0%}" if work.bytes_moved else ""
        found = [f"{work.flops / 1e9:,.3g}", f"{work.fast_share:.0%}", size_of(work.bytes_moved), share]
        if row.at_best is not None and base is not None:
            found += [f"{_milliseconds(row.at_best)} ms", f"{base / row.at_best:.2f} x"]
        table.add_row(row.mode, *found)
    return table


def _summary(report: BenchReport) -> Iterable[tuple[str, str]]:
    seen = {row.mode: row.how for row in report.rows if row.how}
    yield from ((mode, how) for mode, how in seen.items())
    for row in report.rows:
        if row.note:
            yield row.mode, f"batch size {row.batch_size}, {row.status}: {plain(row.note)}"
    yield (
        "Speed",
        f"in multiples of {report.rows[0].mode}; accuracy: signal to error of the outputs against fp32",
    )
    if report.interrupted:
        yield "Note", "interrupted: what was finished is here"
    for note in report.notes:
        yield "Note", plain(note)
