"""Writes a change of a file as a unified diff that ``patch`` takes."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import unified_diff

__all__ = ["unified"]

_NO_NEWLINE = "\\ No newline at end of file"


def unified(path: str, before: str, after: str) -> Iterator[str]:
    """The lines of the diff, each without its end; a last line without one is marked for ``patch``."""
    old, new = (text.split("\n") for text in (before, after))
    for line in unified_diff(_marked(old), _marked(new), path, path, lineterm=""):
        body, mark, _ = line.partition(_MARK)
        yield body
        if mark:
            yield _NO_NEWLINE


_MARK = "\0no newline"


def _marked(lines: list[str]) -> list[str]:
    """The lines of a text; one that no newline ends is told from one that ends the file properly."""
    return lines[:-1] if lines[-1] == "" else [*lines[:-1], lines[-1] + _MARK]
