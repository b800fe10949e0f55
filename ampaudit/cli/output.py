"""Writes reports to a terminal, a pipe or a file."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.cli.terminal import print_notes, show
from ampaudit.core.files import write_text
from ampaudit.render.render import as_file, check_format, chosen_format, for_terminal, keeping
from ampaudit.render.terminal import as_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ampaudit.report.documents import Document

_FILE_WIDTH = 100


def deliver_document(document: Document, options: dict[str, Any]) -> None:
    """Print a report, or write it to a file and print the verdict.

    The command's options are ``form``, ``output``, ``force``, ``quiet`` and ``verbose``.
    """
    output: Path | None = options.get("output")
    verbosity = -1 if options.get("quiet") else int(options.get("verbose", 0))
    form = chosen_format(options["form"], output)
    check_format(document.kind, form)

    def printed(console: Console) -> None:
        console.print(for_terminal(document, verbosity), crop=False)

    with keeping(document):
        if output is None and form == "text":
            show(printed)
        else:
            text = as_text(printed, _FILE_WIDTH) if form == "text" else as_file(document, form)
            if output is None:
                click.echo(text, nl=False)
            else:
                write_text(output, text, force=bool(options.get("force")))
                with contextlib.suppress(OSError):  # a full stderr does not matter once the file is written
                    show(lambda console: console.print(for_terminal(document, -1), crop=False), stderr=True)
                    print_notes(f"written to {output}")
        sys.stdout.flush()


def print_result(content: RenderableType, text: str | None) -> None:
    """Print ``text``, or, if it is ``None``, the content with rich."""
    if text is None:
        show(lambda console: console.print(content, crop=False))
    else:
        click.echo(text, nl=False)
