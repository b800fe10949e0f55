"""Reports to a terminal, to a pipe, or into a file."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.outputs.choice import chosen_format

if TYPE_CHECKING:
    from rich.console import Console

    from ampaudit.outputs.documents import Document

__all__ = ["as_text", "deliver", "deliver_document"]

_FILE_WIDTH = 100


def deliver_document(document: Document, options: dict[str, Any]) -> None:
    """Print a report, or write it to a file; then the verdict still goes to the terminal.

    Args:
        document: any report.
        options: of the command: ``form``, ``output``, ``force``, ``quiet``, ``verbose``.
    """
    from ampaudit.outputs.render import as_file, for_terminal

    output: Path | None = options.get("output")
    verbosity = -1 if options.get("quiet") else int(options.get("verbose", 0))
    form = chosen_format(options["form"], output)
    text = None if form == "text" else as_file(document, form)
    deliver(
        lambda console: console.print(for_terminal(document, verbosity)),
        text,
        output,
        force=bool(options.get("force")),
        verdict=lambda console: console.print(for_terminal(document, -1)),
    )


def as_text(show: Callable[[Console], None]) -> str:
    """What is printed, as the text of a file: no colours, no trailing blanks."""
    from rich.console import Console

    stream = io.StringIO()
    show(Console(file=stream, width=_FILE_WIDTH, highlight=False))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def deliver(
    show: Callable[[Console], None],
    text: str | None,
    output: Path | None,
    *,
    force: bool,
    verdict: Callable[[Console], None] | None = None,
) -> None:
    """Print a result, or write it to a file.

    Args:
        show: prints it for people.
        text: is printed instead, if there is one.
        output: the file.
        force: replace it.
        verdict: printed on stderr when the result goes to a file.
    """
    from rich.console import Console

    if output is None and text is None:
        show(Console(highlight=False))
        return
    text = as_text(show) if text is None else text
    if output is None:
        click.echo(text, nl=False)
        return
    from ampaudit.files import write_text

    write_text(output, text, force=force)
    if verdict is not None:
        verdict(Console(stderr=True, highlight=False))
    click.echo(f"written to {output}", err=True)
