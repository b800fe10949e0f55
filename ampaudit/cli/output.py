"""Text for people, to a terminal or into a file."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["as_text", "deliver"]

_FILE_WIDTH = 100


def as_text(show: Callable[[Console], None]) -> str:
    """What is printed, as the text of a file: no colours, no trailing blanks."""
    from rich.console import Console

    stream = io.StringIO()
    show(Console(file=stream, width=_FILE_WIDTH, highlight=False))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def deliver(show: Callable[[Console], None], json: str | None, output: Path | None, *, force: bool) -> None:
    """Print a result, or write it to a file; ``json`` is printed instead of what ``show`` shows."""
    if output is None and json is None:
        from rich.console import Console

        show(Console(highlight=False))
        return
    text = json if json is not None else as_text(show)
    if output is None:
        click.echo(text, nl=False)
        return
    from ampaudit.files import write_text

    write_text(output, text, force=force)
    click.echo(f"written to {output}", err=True)
