"""Renders a summary in GitHub-flavored Markdown, for a pull request or a workflow's summary page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ampaudit.core.text import escape_control
from ampaudit.findings.finding import Severity
from ampaudit.render.blocks import Block, Facts, Indented, Labelled, Line, Section, Table
from ampaudit.render.findings import MARKS, Alert, Suite, relative_path
from ampaudit.render.view import Renderable, view_of

_SPECIAL = re.compile(r"[\\`*_{}\[\]<>()#|~&@!\n]|:(?!\s)")
_ROWS, _DETAILS = 25, 10


def to_markdown(document: Renderable) -> str:
    """Return the digest of a document: paragraphs, tables and lists."""
    view = view_of(document)
    parts: list[str] = []
    for part in view.digest():
        parts += _suite(part) if isinstance(part, Suite) else _section(part)
    versions = [suite.tool_version for suite in view.suites()] if view.offers("suites") else []
    parts += [f"<sub>ampaudit {escaped(version)}</sub>" for version in versions[:1]]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Escape text so that nothing in it is Markdown, HTML, a mention or a reference."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", escape_control(text))


def code(text: str) -> str:
    """Return a name as inline code, or escaped if it could break out of that."""
    safe = escape_control(text)
    return f"`{safe}`" if safe.strip() and not re.search(r"[`|\\]", safe) else escaped(text)


def _section(section: Section) -> Iterator[str]:
    if section.title:
        title = _text(section.heading)
        yield f"## {title}" if section.level == 2 else f"{title}:"
    yield from _blocks(section.blocks)


def _blocks(blocks: Iterable[Block]) -> Iterator[str]:
    """Render blocks; consecutive unwrapped lines become one code block."""
    for is_code, group in groupby(blocks, lambda block: isinstance(block, Line) and not block.wrap):
        if is_code:
            yield _fenced("\n".join(map(str, group)))
        else:
            for block in group:
                yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    match block:
        case Line():
            yield _text(block)
        case Table():
            right = [index for index in range(len(block.heads)) if index not in block.left]
            yield _table(block.heads, (map(_text, row) for row in block.rows), right)
        case Facts():
            items = (": ".join(text for cell in row if (text := _text(cell).strip())) for row in block.rows)
            yield "\n".join(f"- {text}" for text in items)
        case Labelled():
            for label, blocks in block.rows:
                yield f"{_text(label)}:"
                yield from _blocks(blocks)
        case Indented():
            yield from _blocks(block.blocks)


def _text(line: Line) -> str:
    return "".join(code(text) if style == "code" else escaped(text) for text, style in line.pieces)


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]], right: Sequence[int] = ()) -> str:
    """Render a table; the columns in ``right`` are right-aligned."""
    rule = ("--:" if index in right else "---" for index in range(len(heads)))
    body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((f"| {' | '.join(heads)} |", f"|{'|'.join(rule)}|", *body))


def _suite(suite: Suite) -> Iterator[str]:
    """Render the verdict, errors, and the findings graver than notes."""
    yield f"## {MARKS[suite.verdict]}: {code(suite.name)}"
    gaps = f"; {escaped(suite.gaps)}" if suite.gaps else ""
    yield f"{escaped(suite.label or suite.extent)}: {suite.counts}{gaps}; gate: {escaped(suite.gate)}"
    if suite.errors:
        yield "\n".join(f"- {code(case)}: {escaped(text)}" for case, text in suite.errors.items())
    alerts = [alert for alert in suite.active if alert.level is not Severity.NOTE]
    if alerts:
        yield _table(("", "finding", "where", "line"), map(_row, alerts[:_ROWS]))
    if len(alerts) > _ROWS:
        yield f"and {len(alerts) - _ROWS} more"
    for alert in alerts[:_DETAILS]:
        yield from _details(alert)
    if suite.combined is not None:
        yield escaped(f"{suite.combined.title}: {suite.combined.in_words}; {suite.combined.after}")
        yield _fenced(suite.combined.text.rstrip(), "yaml")
        if suite.combined.code:
            yield "The same as PyTorch code:"
            yield _fenced(suite.combined.code.rstrip(), "python")


def _row(alert: Alert) -> tuple[str, ...]:
    line = code(f"{relative_path(alert.line.file)}:{alert.line.line}") if alert.line is not None else ""
    return alert.level.value, escaped(f"{alert.code} {alert.title}"), code(alert.site), line


def _details(alert: Alert) -> Iterator[str]:
    lines = [*alert.text.split("\n"), *([f"next: {alert.advice}"] if alert.advice else [])]
    title = f"{alert.level.value}: {escaped(alert.code)} at {escaped(alert.site)}"
    yield f"<details><summary>{title}</summary>"
    yield "<br>\n".join(map(escaped, lines))
    yield from (_fenced(trial.diff, "diff") for trial in alert.trials if trial.diff)
    yield "</details>"


def _fenced(text: str, language: str = "") -> str:
    """Return a code block whose fence is longer than any run of backticks in it."""
    ticks = max((len(row) for row in re.findall("`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}{language}\n{text}\n{fence}"
