"""Measures how time grows with a model's ops, with batches, and with a report's sites.

Prints medians, and the exponent of the power law of time against size (1 is linear): fitted through all
sizes, and from the last size but one to the last, where the fixed cost of an audit weighs least.

    python -m benchmarks.growth [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import ampaudit
from ampaudit.render.json import to_json
from ampaudit.render.render import as_file
from ampaudit.report.documents import parse_document
from ampaudit.report.model import Report
from benchmarks.options import parser
from benchmarks.reports import SAVED, repeat_sites
from benchmarks.timing import exponent, repeated_seconds

OPS = (100, 1000, 10_000)
BATCHES = (1, 10, 100)
SITES = (500, 5000, 50_000)
TARGET = 1.1


class Block(nn.Module):
    """Five ops, as in half of a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


def chain(ops: int) -> nn.Module:
    """Return a model of ``ops`` ops, whose values stay small."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(ops // 5))).eval()


def tasks(*, smoke: bool) -> dict[str, tuple[Sequence[int], Callable[[int], Callable[[], object]]]]:
    """Return the sizes of each table, and a function that prepares the task of one size."""
    saved = parse_document(SAVED.read_text(encoding="utf-8"), SAVED.name)
    assert isinstance(saved, Report)

    def scan_ops(size: int) -> Callable[[], object]:
        model = chain(size)
        return lambda: ampaudit.scan(model, torch.randn(4, 8))

    def scan_batches(count: int) -> Callable[[], object]:
        model = chain(10 if smoke else 100)
        return lambda: ampaudit.scan(model, batches=[torch.randn(4, 8) for _ in range(count)])

    def rendering(form: str) -> Callable[[int], Callable[[], object]]:
        def prepared(sites: int) -> Callable[[], object]:
            report = repeat_sites(saved, sites)
            return lambda: as_file(report, form)

        return prepared

    def reading(sites: int) -> Callable[[], object]:
        text = to_json(repeat_sites(saved, sites))
        return lambda: parse_document(text, "report.json")

    ops, batches, sites = ((10, 20), (1, 2), (20, 40)) if smoke else (OPS, BATCHES, SITES)
    return {
        "scan, ops": (ops, scan_ops),
        "scan, batches of 100 ops": (batches, scan_batches),
        "HTML page, sites": (sites, rendering("html")),
        "JSON written, sites": (sites, rendering("json")),
        "JSON read, sites": (sites, reading),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=3).parse_args(arguments)
    rows: dict[str, Any] = {}
    for name, (sizes, prepare) in tasks(smoke=options.smoke).items():
        times = {}
        for size in sizes:
            task = prepare(size)
            task()  # the first call imports
            times[size] = statistics.median(repeated_seconds(task, options.repeats))
        last = exponent(dict(list(times.items())[-2:]))
        rows[name] = {"seconds": times, "exponent": exponent(times), "last exponent": last}
        figures = "  ".join(f"{size:,}: {seconds:.3f} s" for size, seconds in times.items())
        print(f"{name:26} {figures}  exponent {exponent(times):.2f}, last step {last:.2f}, target {TARGET}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
