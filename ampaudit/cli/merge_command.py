"""``ampaudit merge``: merges the parts of a scan into one report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from ampaudit.cli.options import FILE, FirstRankCommand, report_options
from ampaudit.core.errors import InputError, first_line
from ampaudit.core.untrusted import describe
from ampaudit.findings.finding import FailOnGaps


@click.command("merge", cls=FirstRankCommand)
@click.argument("parts", nargs=-1, required=True, type=FILE)
@click.option("--model", metavar="MODEL", help="Location of the model.  [default: as in the parts]")
@click.option(
    "--fail-on",
    type=click.Choice(get_args(FailOnGaps)),
    help="Lowest severity that makes the exit code 1; 'gap' means errors and unaudited parts."
    "  [default: as in the parts]",
)
@report_options("scan", "Show notes and every site.")
@click.pass_context
def merge_command(context: click.Context, /, parts: tuple[Path, ...], **options: Any) -> None:
    """Merge PARTS, which ``ampaudit scan --part`` wrote, into one report.

    The report is that of one scan over all batches. The model is loaded and traced again, with the options of
    the parts. Its batches do not run again, unless measured rules of the policy need a second pass.
    """
    from ampaudit.cli.part import parse_part_options
    from ampaudit.cli.scan_command import report_scan, scan_command
    from ampaudit.parallel.parts import MergedParts, read_parts

    parts_read = read_parts(parts)
    first = parts_read[0].part
    model = options.pop("model") or _local_location(first.location)
    scan_options, words = parse_part_options(scan_command, model, first.words)
    if (fail_on := options.pop("fail_on")) is not None:
        scan_options["fail_on"], words = fail_on, words | {"fail_on"}
    try:
        report_scan(context, model, scan_options | options, MergedParts(parts_read), explicit=words)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # records from elsewhere may be valid and still be of another model
        raise InputError(
            f"the parts are not records of this model: {type(error).__name__}: {first_line(error)}",
            hint="write them again; if that does not help, report it with the output of --debug",
        ) from error


def _local_location(location: str) -> str:
    """Check that the model's location in a part is below this directory, and return it.

    A part may come from elsewhere, and must not decide which code runs.

    Raises:
        InputError: The location is elsewhere.
    """
    path = Path(location.partition(":")[0])
    here = Path.cwd().resolve()
    if path.exists() and path.resolve().is_relative_to(here):
        return location
    raise InputError(
        f"the parts are of {describe(location)}, which is not below the current directory",
        hint=f"if that is the model to load, add --model {describe(location) if path.exists() else 'PATH'}",
    )
