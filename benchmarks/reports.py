"""Measures what rendering a saved report of 5,000 sites costs, in every format.

Prints the time of each format in this process (medians), the time of the whole command, which is what a user
waits for, and the size of HTML pages. ``growth.py`` times larger reports.

    python -m benchmarks.reports [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ampaudit.core.sites import SiteId
from ampaudit.render.json import to_json
from ampaudit.render.render import OUTPUT_FORMATS, as_file
from ampaudit.report.documents import parse_document, read_document
from ampaudit.report.model import Report
from benchmarks.options import parser
from benchmarks.timing import repeated_seconds

SAVED = Path(__file__).parents[1] / "tests" / "data" / "reports" / "overflow.json"
SIZES = (500, 1000, 2500, 5000, 10_000)
FORMS = tuple(form for form in OUTPUT_FORMATS if form != "text")
LIMIT_SECONDS = 1.0


def repeat_sites(report: Report, sites: int) -> Report:
    """Return the report of a larger model, which repeats the original one."""
    own = report.sites
    repeated = []
    for index in range(sites):
        site = own[index % len(own)]
        layer = f"stack.{index // len(own)}.{site.layer}"
        repeated.append(replace(site, layer=layer, site=SiteId(f"{layer}/{site.op}#{index}")))
    return replace(report, sites=tuple(repeated))


def spread(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    seconds = repeated_seconds(call, repeats)
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


def command(path: Path, form: str) -> None:
    arguments = [sys.executable, "-m", "ampaudit", "report", str(path), "--format", form]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=9).parse_args(arguments)
    sites, sizes = (50, (20, 50)) if options.smoke else (5000, SIZES)
    base = parse_document(SAVED.read_text(encoding="utf-8"), SAVED.name)
    assert isinstance(base, Report)
    report = repeat_sites(base, sites)
    found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.processor()}
    found["sites"] = sites
    found["rendering"] = {form: spread(lambda f=form: as_file(report, f), options.repeats) for form in FORMS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        path.write_text(to_json(report), encoding="utf-8")
        found["json bytes"] = path.stat().st_size
        found["reading"] = spread(lambda: read_document(path), options.repeats)
        found["command"] = {
            f: spread(lambda f=f: command(path, f), options.repeats) for f in ("html", "sarif")
        }
    found["page bytes"] = {size: len(as_file(repeat_sites(base, size), "html").encode()) for size in sizes}
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['sites']:,} sites, {found['json bytes'] / 1e6:.1f} MB of JSON, "
        f"read in {found['reading']['median']:.2f} s"
    )
    for form, row in found["rendering"].items():
        print(f"{form:10} {row['median']:.3f} s ({row['least']:.3f} to {row['most']:.3f})")
    for form, row in found["command"].items():
        verdict = "within" if row["median"] < LIMIT_SECONDS else "OVER"
        spent = f"{row['median']:.2f} s ({row['least']:.2f} to {row['most']:.2f})"
        print(f"the whole command, {form}: {spent}, {verdict} the limit of {LIMIT_SECONDS:g} s")
    for size, count in found["page bytes"].items():
        print(f"page of {size:6,} sites: {count / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
