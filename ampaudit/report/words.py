"""How names and numbers are written in every report for people."""

from __future__ import annotations

import unicodedata

__all__ = ["plain", "short_op", "size_of"]


def plain(name: str) -> str:
    """A name from a model, safe to print: control and escape characters are shown, not obeyed."""
    return "".join(
        char if unicodedata.category(char)[0] != "C" else char.encode("unicode_escape").decode()
        for char in name
    )


def short_op(op: str) -> str:
    """An op without the parts that say nothing: ``aten.linear.default`` is ``linear``."""
    return op.removeprefix("aten.").removesuffix(".default")


def size_of(count: int) -> str:
    """A byte count with three digits and a unit."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
