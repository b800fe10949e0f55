"""The report as one HTML file that needs nothing else: no network, no server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from ampaudit.core.errors import UsageError
from ampaudit.core.text import escape_control, format_number, format_power, format_scale
from ampaudit.render.bench_tables import bench_facts, bench_tables
from ampaudit.render.html.bench_figures import bench_data
from ampaudit.render.html.figures import figure_data
from ampaudit.render.html.views import ReportView, view_of
from ampaudit.report.bench import BenchReport
from ampaudit.report.comparison import Comparison
from ampaudit.report.documents import Document
from ampaudit.report.model import Report
from ampaudit.report.pages import all_pages

__all__ = ["to_html"]

_HERE = Path(__file__).parent
# in this order: each may use those before it
_SCRIPTS = (
    *("values.js", "theme.js", "marks.js", "range.js", "detail.js", "strip.js", "scales.js", "findings.js"),
    "main.js",
)
_BENCH_SCRIPTS = ("values.js", "theme.js", "bench.js")


def to_html(document: Document) -> str:
    """The page.

    Raises:
        UsageError: the report is not that of a scan or of ``bench``.
    """
    if isinstance(document, BenchReport):
        return _bench(document)
    if isinstance(document, Report):
        reports: Sequence[Report] = (document,)
    elif isinstance(document, Comparison):
        reports = document.reports
    else:
        raise UsageError(
            "only reports of scans and of bench have an HTML page", hint="use --format text, json or markdown"
        )
    views = [view_of(report) for report in reports]
    scripts = _scripts(_SCRIPTS)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            views=views,
            data=_embedded([figure_data(report) for report in reports]),
            style=Markup((_HERE / "style.css").read_text(encoding="utf-8")),
            scripts=[Markup(script) for script in scripts],
            policy=_policy(scripts),
            pages=_pages(views),
            titles={code: page.title for code, page in all_pages().items()},
        )
    )


def _bench(report: BenchReport) -> str:
    scripts = _scripts(_BENCH_SCRIPTS)
    return (
        _environment()
        .get_template("bench.html.j2")
        .render(
            report=report,
            tables=bench_tables(report),
            facts=bench_facts(report),
            data=_embedded(bench_data(report)),
            style=Markup((_HERE / "style.css").read_text(encoding="utf-8")),
            scripts=[Markup(script) for script in scripts],
            policy=_policy(scripts),
        )
    )


@cache
def _scripts(names: tuple[str, ...]) -> tuple[str, str]:
    """The chart library, and our own scripts as one."""
    library = (_HERE / "vendor" / "plot.js").read_text(encoding="utf-8")
    own = "\n".join((_HERE / "script" / name).read_text(encoding="utf-8") for name in names)
    return library, f'"use strict";\n(() => {{\n{own}\n}})();\n'


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy: these scripts and no others, and no request to anywhere."""
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}"


def _embedded(data: Any) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _breakable(name: str) -> Markup:
    """A name that a browser may break after a dot or a slash."""
    return Markup(str(escape(name)).replace(".", ".<wbr>").replace("/", "/<wbr>"))


def _pages(views: Sequence[ReportView]) -> dict[str, Markup]:
    """The page of each code that was found, as HTML."""
    known = all_pages()
    codes = sorted({shown.code for view in views for shown in view.findings if shown.code in known})
    return {code: Markup(_page_body(known[code].text)) for code in codes}


def _page_body(text: str) -> str:
    """A page without its title, which stands above it, and with headings that fit below that."""
    markdown = MarkdownIt("commonmark", {"html": False})
    tokens = markdown.parse(text)[3:]
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h3"
    return str(markdown.renderer.render(tokens, markdown.options, {}))


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "plain": escape_control,
        "number": format_number,
        "power": format_power,
        "scale": format_scale,
        "breakable": _breakable,
    }
    return made
