"""``ampaudit explain``: the page of a check, or the list of all checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console


@click.command("explain")
@click.argument("code", required=False)
def explain_command(code: str | None) -> None:
    """Explain CODE: what it means, why it is bad, and what to write instead; without CODE, list all codes."""
    from ampaudit.cli.terminal import show

    show(lambda console: _print_page(console, code) if code is not None else _print_list(console))


def _print_page(console: Console, code: str) -> None:
    from rich.markdown import Markdown

    from ampaudit.findings.pages import page_of
    from ampaudit.findings.pages.page import command_of

    page = page_of(code)
    console.print(Markdown(page.text))
    bad, good = command_of(page.code, page.bad), command_of(page.code, page.good)
    console.print(f"\nTo see it, save the bad example as model.py and run: {bad}")
    if good != bad:
        console.print(f"For the good example, run: {good}")


def _print_list(console: Console) -> None:
    from ampaudit.findings.pages import all_pages
    from ampaudit.findings.pages.page import family
    from ampaudit.render.grid import open_table

    table = open_table("code", "check", "severity", "about", left=("check", "severity", "about"))
    for page in all_pages().values():
        table.add_row(page.code, page.title, page.severity, family(page.code))
    console.print(table, crop=False)
