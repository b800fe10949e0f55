"""Command lines, parsed and not run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ampaudit.cli.program import main


def parsed(name: str, words: Sequence[str]) -> click.Context:
    """The context of a command as the program makes it, below its own."""
    program = click.Context(main, info_name="ampaudit", **main.context_settings)
    command = main.get_command(program, name)
    assert command is not None
    return command.make_context(name, list(words), parent=program)
