"""The table of modes for people: memory and speed against the first one, accuracy beside them."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampaudit.core.text import escape_control
from ampaudit.render.bench_tables import BROKEN, BenchTable, bench_facts, bench_tables
from ampaudit.render.grid import labelled, open_table
from ampaudit.report.bench import BenchReport

__all__ = ["render_bench"]

_STYLES = {BROKEN: "bold red", "not supported": "yellow", "out of memory": "yellow", "failed": "yellow"}


def render_bench(report: BenchReport) -> RenderableType:
    """The tables of each batch size, and what did not run."""
    kind = "training steps" if report.train else "forward passes"
    where = f"{escape_control(report.device_name)} ({report.device})"
    head = (
        f"  {escape_control(report.model.source)}: {kind} on {where}, "
        f"median of {report.repeats}, modes in turns"
    )
    parts: list[RenderableType] = [Text.assemble(("ampaudit ", "bold"), (report.tool.version, "bold"), head)]
    for table in bench_tables(report):
        parts += [Text(), Text(table.title, "bold"), _rendered(table)]
    parts += [Text(), labelled(bench_facts(report))]
    return Group(*parts)


def _rendered(table: BenchTable) -> Table:
    made = open_table(*table.heads)
    for row in table.rows:
        made.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    return made
