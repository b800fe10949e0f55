"""Renders a document as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from ampaudit.core import __version__
from ampaudit.core.text import escape_control, format_number, format_scale
from ampaudit.findings.pages import all_pages
from ampaudit.render.blocks import Block, Facts, Indented, Labelled, Line, Table
from ampaudit.render.findings import relative_path
from ampaudit.render.view import Renderable, ViewPage, view_of

_HERE = Path(__file__).parent


def to_html(document: Renderable) -> str:
    """Return a document's own page, or one made of its sections."""
    view = view_of(document)
    page = view.page()
    if page is None:
        about: dict[str, Any] = {"kind": document.kind, "version": __version__}
        about["word"], about["sentence"] = view.verdict()
        about["sections"] = list(view.sections(1))
        page = ViewPage("document.html.j2", ("theme.js",), None, about)
    scripts = _scripts(tuple(page.scripts), library=page.data is not None)
    values: dict[str, Any] = {
        **page.values,
        "title": view.title,
        "data": _embedded(page.data),
        "style": Markup((_HERE / "style.css").read_text(encoding="utf-8")),
        "scripts": [Markup(script) for script in scripts],
        "policy": _policy(scripts),
        "pages": _pages(page.values.get("codes", ())),
        "titles": {code: documented.title for code, documented in all_pages().items()},
    }
    return _environment().get_template(page.template).render(values)


@cache
def _scripts(names: tuple[str, ...], *, library: bool) -> tuple[str, ...]:
    """Return the scripts as one, after the chart library if it is needed."""
    source = "\n".join((_HERE / "script" / name).read_text(encoding="utf-8") for name in names)
    wrapped = f'"use strict";\n(() => {{\n{source}\n}})();\n'
    return ((_HERE / "vendor" / "plot.js").read_text(encoding="utf-8"), wrapped) if library else (wrapped,)


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy that allows only these scripts and no requests."""
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}"


def _embedded(data: Any) -> Markup:
    """Return data as JSON that cannot close its enclosing element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _printable(value: Any) -> Any:
    """Escape control characters in a string; jinja2 escapes HTML afterwards."""
    return escape_control(value) if type(value) is str else value


def _lines(text: str) -> Markup:
    """Escape a text except for its line breaks."""
    return Markup("\n").join(map(escape_control, text.split("\n")))


def _breakable(name: str) -> Markup:
    """Allow line breaks in a name after dots and slashes."""
    return Markup(str(escape(escape_control(name))).replace(".", ".<wbr>").replace("/", "/<wbr>"))


def _pages(codes: Collection[str]) -> dict[str, Markup]:
    pages = all_pages()
    return {code: Markup(_page_body(pages[code].text)) for code in sorted(codes) if code in pages}


def _page_body(text: str) -> str:
    """Return a page without its title, with headings one level down."""
    markdown = MarkdownIt("commonmark", {"html": False})
    tokens = markdown.parse(text)[3:]
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h3"
    return str(markdown.renderer.render(tokens, markdown.options, {}))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": format_number,
        "scale": format_scale,
        "breakable": _breakable,
        "lines": _lines,
        "relative": relative_path,
        "html": html_of,
    }
    return environment


def html_of(blocks: Iterable[Block]) -> Markup:
    """Render blocks recursively; consecutive unwrapped lines become one code block."""
    parts: list[Markup] = []
    for code, group in groupby(blocks, lambda block: isinstance(block, Line) and not block.wrap):
        if code:
            lines = _joined(_text(line) for line in group if isinstance(line, Line))
            parts.append(Markup('<pre tabindex="0">{}</pre>').format(lines))
        else:
            parts += map(_block, group)
    return _joined(parts)


def _block(block: Block) -> Markup:
    match block:
        case Line():
            return Markup("<p>{}</p>").format(_text(block))
        case Table():
            return _table(block)
        case Facts():
            return _list((row[0], [_text(text) for text in row[1:]]) for row in block.rows)
        case Labelled():
            return _list((label, [html_of(blocks)]) for label, blocks in block.rows)
        case Indented():
            return Markup('<div class="indented">{}</div>').format(html_of(block.blocks))


def _joined(parts: Iterable[Markup]) -> Markup:
    return Markup("\n").join(parts)


def _text(line: Line) -> Markup:
    """Render styled pieces, with one class per style word."""
    marked = Markup('<span class="{}">{}</span>')
    return Markup("").join(marked.format(style, text) if style else text for text, style in line.pieces)


def _list(rows: Iterable[tuple[Line, Iterable[Markup]]]) -> Markup:
    inner = (Markup("<dt>{}</dt><dd>{}</dd>").format(_text(label), _joined(parts)) for label, parts in rows)
    return Markup('<dl class="facts">{}</dl>').format(_joined(inner))


def _table(table: Table) -> Markup:
    flush = ["" if index in table.left else Markup(' class="num"') for index in range(len(table.heads))]
    head, cell = Markup('<th scope="col"{}>{}</th>'), Markup("<td{}>{}</td>")
    heads = ((head if name else cell).format(css, name) for css, name in zip(flush, table.heads, strict=True))
    rows = (
        Markup("<tr>{}</tr>").format(_joined(map(cell.format, flush, map(_text, row)))) for row in table.rows
    )
    return Markup(
        '<div class="scroll" tabindex="0" role="group" aria-label="Table">'
        "<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(_joined(heads), _joined(rows))
