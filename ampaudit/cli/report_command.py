"""``ampaudit report`` and ``ampaudit diff``: convert and compare saved reports, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ampaudit.cli.options import FILE, config_from, config_options, report_options
from ampaudit.cli.output import deliver_document
from ampaudit.report.compare import DiffConfig, differences


@click.command("report")
@click.argument("file", type=FILE)
@report_options(None, "Show notes and every site.")
def report_command(file: Path, **options: Any) -> None:
    """Show the JSON report in FILE, or the one of a converted directory, in any format.

    No model and no code in FILE is run. The exit code is 0 whatever the report says.
    """
    from ampaudit.report.documents import read_document

    deliver_document(read_document(file), options)


@click.command("diff")
@click.argument("old", type=FILE)
@click.argument("new", type=FILE)
@config_options(DiffConfig)
@report_options("diff", "Show every layer and site.", quiet=False)
@click.pass_context
def diff_command(context: click.Context, /, old: Path, new: Path, **options: Any) -> None:
    """Show per layer what got better or worse between the scan reports OLD and NEW (JSON).

    Exit codes: 0 nothing is worse, 1 something is, 2 bad input.
    """
    from ampaudit.report.documents import read_document

    config = config_from(DiffConfig, options)
    changes = differences(read_document(old), read_document(new), config)
    deliver_document(changes, options)
    context.exit(changes.exit_code)
