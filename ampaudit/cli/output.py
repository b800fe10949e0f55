"""Writes reports to a terminal, a pipe or a file."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.core.errors import OutputError
from ampaudit.render.formats import chosen_format
from ampaudit.render.terminal import as_text

if TYPE_CHECKING:
    from rich.console import Console

    from ampaudit.report.documents import Document

__all__ = ["as_text", "bound_size", "deliver", "deliver_document", "make_printable", "show"]

_MIN_SIZE, _MAX_SIZE = 20, 1000  # columns
_HANDLER = "ampaudit-ascii"
# the marks that our own reports use; other letters come from names, and are shown as escapes
_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#", strict=True)),
    **{
        "…": "...",
        "—": "-",
        "–": "-",
        "−": "-",
        "×": "x",
        "≤": "<=",
        "≥": ">=",
        "→": "->",
        "•": "*",
        "│": "|",
    },
    **{"─": "-", "━": "-", "┃": "|", "⋮": ":", "’": "'", "“": '"', "”": '"', "▌": "|"},
    **dict.fromkeys("✅❌⚠", ""),
    **dict.fromkeys("┏┓┗┛┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
}
_FILE_WIDTH = 100


def deliver_document(document: Document, options: dict[str, Any]) -> None:
    """Print a report, or write it to a file and print the verdict.

    Args:
        document: any report.
        options: of the command: ``form``, ``output``, ``force``, ``quiet``, ``verbose``.
    """
    from ampaudit.render.render import as_file, check_format, for_terminal, keeping

    output: Path | None = options.get("output")
    verbosity = -1 if options.get("quiet") else int(options.get("verbose", 0))
    form = chosen_format(options["form"], output)
    check_format(document.kind, form)
    with keeping(document):
        deliver(
            lambda console: console.print(for_terminal(document, verbosity), crop=False),
            None if form == "text" else as_file(document, form),
            output,
            force=bool(options.get("force")),
            verdict=lambda console: console.print(for_terminal(document, -1), crop=False),
        )
        sys.stdout.flush()


def deliver(
    printed: Callable[[Console], None],
    text: str | None,
    output: Path | None,
    *,
    force: bool,
    verdict: Callable[[Console], None] | None = None,
) -> None:
    """Print a result, or write it to a file.

    Args:
        printed: prints it for people.
        text: is printed instead, if there is one.
        output: the file.
        force: replace it.
        verdict: printed on stderr when the result goes to a file.
    """
    if output is None and text is None:
        show(printed)
        return
    text = as_text(printed, _FILE_WIDTH) if text is None else text
    if output is None:
        click.echo(text, nl=False)
        return
    from ampaudit.core.files import write_text

    write_text(output, text, force=force)
    with contextlib.suppress(OSError):  # a full stderr does not matter once the file is written
        if verdict is not None:
            show(verdict, stderr=True)
        click.echo(f"written to {output}", err=True)


class _StandardOutput(io.FileIO):
    """File descriptor 1, whose failures are told as what they are."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write to standard output: {error.strerror}", hint="free some space, or use -o FILE"
            ) from error


def bound_size() -> None:
    """Keep COLUMNS and LINES within what can be printed; what is no size does not count."""
    for name in ("COLUMNS", "LINES"):
        text = os.environ.pop(name, "").lstrip("0")
        if text.isascii() and text.isdigit():
            size = int(text[: len(str(_MAX_SIZE)) + 1])
            os.environ[name] = str(min(max(size, _MIN_SIZE), _MAX_SIZE))


def make_printable() -> None:
    """Write characters that the encoding of stdout or stderr lacks in ASCII, and explain a full stdout."""
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
        return "\ufffd", error.end  # who captures a stream reads it with the stream's own handler
    text = error.object[error.start : error.end]
    plain = (_ASCII.get(letter, letter) for letter in text)
    return "".join(p.encode("ascii", "backslashreplace").decode() for p in plain), error.end


def show(printed: Callable[[Console], None], *, stderr: bool = False) -> None:
    """Print with rich, without colors and trailing blanks unless it is a terminal."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        printed(console)
        return
    stream = sys.stderr if stderr else sys.stdout
    stream.write(as_text(printed, console.width))
