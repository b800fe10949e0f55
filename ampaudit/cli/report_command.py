"""``ampaudit report`` and ``ampaudit diff``: convert and compare saved reports, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ampaudit.cli.options import debug_option, output_option, report_format_option
from ampaudit.cli.output import deliver_document

__all__ = ["diff_command", "report_command"]

_FILE = click.Path(path_type=Path)


@click.command("report")
@click.argument("file", type=_FILE)
@report_format_option()
@output_option
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict.")
@click.option("-v", "--verbose", is_flag=True, help="Show notes and every site.")
@debug_option
def report_command(file: Path, **options: Any) -> None:
    """Show the JSON report in FILE, or the one of a converted directory, in any format.

    Nothing is run, and nothing in FILE is. The exit code is 0 whatever the report says.
    """
    from ampaudit.core.files import check_writable
    from ampaudit.report.saved import read_document

    if options["output"] is not None:
        check_writable(options["output"], force=options["force"])
    deliver_document(read_document(file), options)


@click.command("diff")
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
@click.option(
    "--bits",
    type=click.FloatRange(min=0),
    default=0.5,
    show_default=True,
    help="Smallest change of headroom to report.",
)
@click.option(
    "--db",
    type=click.FloatRange(min=0),
    default=3.0,
    show_default=True,
    help="Smallest change of accuracy to report.",
)
@report_format_option()
@output_option
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option("-v", "--verbose", is_flag=True, help="Show every layer and site.")
@debug_option
@click.pass_context
def diff_command(context: click.Context, /, old: Path, new: Path, **options: Any) -> None:
    """Show per layer what got better or worse between the scan reports OLD and NEW (JSON).

    Exit codes: 0 nothing is worse, 1 something is, 2 bad input.
    """
    from ampaudit.core.files import check_writable
    from ampaudit.report.compare import differences
    from ampaudit.report.saved import read_document

    if options["output"] is not None:
        check_writable(options["output"], force=options["force"])
    found = differences(read_document(old), read_document(new), options["bits"], options["db"])
    deliver_document(found, options)
    context.exit(found.exit_code)
