"""Renders documents as flat tables for spreadsheets and data frames.

Column names are snake_case and end in the unit, numbers are plain, and missing values are empty, so that
pandas, polars and pyarrow infer the types.
"""

from __future__ import annotations

import csv
import io

from ampaudit.core.text import escape_control
from ampaudit.render.view import Cell, Renderable, view_of

# prefixes of spreadsheet formulas, including their full-width forms
_FORMULA = ("=", "+", "-", "@", "\t", "\r", *"\uff1d\uff0b\uff0d\uff20")


def to_csv(document: Renderable) -> str:
    """Return the rows of a document, after a row of column names."""
    view = view_of(document)
    rows, stream = list(view.rows()), io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else view.columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def _cell(value: Cell) -> Cell:
    if not isinstance(value, str):
        return value
    text = escape_control(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
