"""Decodes source files, splits them into lines, converts columns, and writes changes as unified diffs."""

from __future__ import annotations

import codecs
import io
import re
import tokenize
from collections.abc import Iterator
from difflib import unified_diff
from typing import Final

__all__ = [
    "MAX_SOURCE_BYTES",
    "Unreadable",
    "character_column",
    "decode",
    "diff_lines",
    "split_lines",
]

MAX_SOURCE_BYTES: Final = 10_000_000  # what is larger was not written by hand
_NO_NEWLINE: Final = "\\ No newline at end of file"
_NO_NEWLINE_MARK: Final = "\0no newline"


class Unreadable(Exception):
    """A file that cannot be read as Python; the message is one line.

    Attributes:
        line: Line of the problem, from 1; 1 if unknown.
    """

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line


def decode(data: bytes) -> tuple[str, str]:
    """Decode a source file as Python does; return its text and its encoding.

    Raises:
        Unreadable: The file is binary, too large, or not in its declared encoding.
    """
    if len(data) > MAX_SOURCE_BYTES:
        raise Unreadable(f"larger than {MAX_SOURCE_BYTES // 1_000_000} MB")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Unreadable("UTF-16, which Python does not read; save it as UTF-8")
    if b"\0" in data:
        raise Unreadable("a binary file")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, ValueError, LookupError) as error:  # some codecs raise no UnicodeDecodeError
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise Unreadable(f"not text in the declared encoding: {reason}".splitlines()[0]) from error


def split_lines(text: str) -> list[str]:
    """Split a text into lines as Python's parser counts them."""
    return text.split("\n") if "\r" not in text else re.split(r"\r\n|\r|\n", text)


def character_column(line: str, byte_column: int) -> int:
    """Convert a column in UTF-8 bytes, as ``ast`` counts, to characters."""
    return len(line.encode()[:byte_column].decode(errors="ignore"))


def diff_lines(path: str, before: str, after: str) -> Iterator[str]:
    """Yield the lines of a unified diff that ``patch`` applies, each without its line end."""
    old, new = (text.split("\n") for text in (before, after))
    for line in unified_diff(_mark_last_line(old), _mark_last_line(new), path, path, lineterm=""):
        body, mark, _ = line.partition(_NO_NEWLINE_MARK)
        yield body
        if mark:
            yield _NO_NEWLINE


def _mark_last_line(lines: list[str]) -> list[str]:
    """Mark a last line that no newline ends, so that the diff tells it from one that ends properly."""
    return lines[:-1] if lines[-1] == "" else [*lines[:-1], lines[-1] + _NO_NEWLINE_MARK]
