"""Renders blocks as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from markupsafe import Markup

from ampaudit.render.blocks import Block, Facts, Indented, Labelled, Line, Table

__all__ = ["html_of"]


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
