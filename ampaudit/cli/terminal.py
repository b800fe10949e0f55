"""Prints to terminals and pipes, transliterating characters that they cannot show."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ampaudit.core.errors import OutputError
from ampaudit.core.text import escape_control

if TYPE_CHECKING:
    from rich.console import Console

_MIN_SIZE, _MAX_SIZE = 20, 1000  # columns
_HANDLER = "ampaudit-ascii"
# the characters that reports use; others come from names and are escaped
_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#", strict=True)),
    **dict(zip("—–−─━×•│┃▌⋮’“”", '-----x*|||:\'""', strict=True)),
    **{"…": "...", "≤": "<=", "≥": ">=", "→": "->"},
    **dict.fromkeys("✅❌⚠", ""),
    **dict.fromkeys("┏┓┗┛┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
}


class _StandardOutput(io.FileIO):
    """The standard output, with clear errors if it cannot be written."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write to standard output: {error.strerror}", hint="free some space, or use -o FILE"
            ) from error


def print_notes(*lines: str) -> None:
    """Print lines on stderr, with control characters escaped."""
    for line in lines:
        click.echo(escape_control(line), err=True)


def bound_size() -> None:
    """Clamp COLUMNS and LINES to sizes that can be printed, and unset invalid ones."""
    for name in ("COLUMNS", "LINES"):
        text = os.environ.pop(name, "").lstrip("0")
        if text.isascii() and text.isdigit():
            size = int(text[: len(str(_MAX_SIZE)) + 1])
            os.environ[name] = str(min(max(size, _MIN_SIZE), _MAX_SIZE))


def make_printable() -> None:
    """Transliterate characters that the encoding of stdout or stderr lacks; explain a full stdout."""
    codecs.register_error(_HANDLER, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        raw = io.BufferedWriter(_StandardOutput(sys.stdout.fileno(), "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(raw, sys.stdout.encoding, _HANDLER)


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        assert isinstance(error, UnicodeDecodeError)
        return "\ufffd", error.end  # a program that captures the stream may decode it with this handler
    text = error.object[error.start : error.end]
    plain = (_ASCII.get(letter, letter) for letter in text)
    return "".join(p.encode("ascii", "backslashreplace").decode() for p in plain), error.end


def show(printed: Callable[[Console], None], *, stderr: bool = False) -> None:
    """Print with rich; without colors and trailing blanks if the stream is not a terminal."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        printed(console)
        return
    stream = sys.stderr if stderr else sys.stdout
    from ampaudit.render.terminal import as_text

    stream.write(as_text(printed, console.width))
