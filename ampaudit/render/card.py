"""Renders a document as a notebook card and as a data frame."""

from __future__ import annotations

from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from ampaudit.core.errors import UsageError
from ampaudit.core.text import escape_control
from ampaudit.render.view import Renderable, strip_svg, view_of

_ROWS, _LETTERS = 8, 160  # shown in a card; the HTML page shows all
_TONES = {"pass": "good", "error": "bad", "fail": "bad", "warning": "warn"}


def card(document: Renderable) -> str:
    """Return a document as an HTML fragment: the verdict, strips of headroom, and the first rows."""
    view = view_of(document)
    word, sentence = view.verdict()
    pill = f'<i class="{word}">{word}</i> ' if word else ""
    rows = list(document.card_rows())
    table = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:_ROWS])
    more = f"{len(rows) - _ROWS} more; " if len(rows) > _ROWS else ""
    style = (Path(__file__).parent / "html" / "card.css").read_text(encoding="utf-8")
    return (
        f'<div><style>{style}</style><div class="ampaudit"><p><b>{_safe(view.title)}</b> '
        f'<span class="soft">{_safe(view.subject())}</span></p><p>{pill}{_safe(sentence)}</p>'
        f"{''.join(map(strip_svg, view.strips()))}<table>{table}</table>"
        f'<p class="soft">{more}<code>.save("report.html")</code> writes the full report</p></div></div>'
    )


def data_frame(document: Renderable) -> Any:
    """Return the rows of a document as a pandas ``DataFrame``.

    Raises:
        UsageError: Pandas is not installed, or the document has no rows.
    """
    view = view_of(document)
    if not view.offers("rows"):
        raise UsageError(
            f"a document of kind {document.kind!r} has no table", hint='use .save("report.json")'
        )
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise UsageError("to_pandas() needs pandas", hint="pip install pandas") from error
    return pandas.DataFrame(list(view.rows()))


def _cell(value: object) -> str:
    tone = _TONES.get(str(value).lower(), "")
    return f'<td class="{tone}">{_safe(value)}</td>' if tone else f"<td>{_safe(value)}</td>"


def _safe(value: object) -> str:
    text = escape_control(str(value))
    return escape(text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…")
