"""Options that several commands have, each once."""

from __future__ import annotations

from pathlib import Path

import click

from ampaudit.core.pyproject import LEVELS
from ampaudit.render.formats import OUTPUT_FORMATS

__all__ = [
    "debug_option",
    "device_option",
    "dtype_option",
    "fail_on_option",
    "format_option",
    "ignore_option",
    "output_option",
    "policies_option",
    "report_format_option",
]

format_option = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
report_format_option = click.option(
    "--format",
    "form",
    type=click.Choice(list(OUTPUT_FORMATS)),
    help="[default: what the suffix of --output says; else text]",
)
debug_option = click.option("--debug", is_flag=True, help="Show Python tracebacks of errors.")
device_option = click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True
)
ignore_option = click.option(
    "--ignore", multiple=True, metavar="CODE[:LAYER]", help="Hide findings by code, and layer glob; repeat."
)
dtype_option = click.option("--dtype", default="float16", show_default=True, help="float16 or bfloat16.")
policies_option = click.option(
    "--policy", default="ampaudit", show_default=True, help="Policy name or rule file; several with commas."
)
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the report to FILE."
)
fail_on_option = click.option(
    "--fail-on",
    type=click.Choice(LEVELS),
    default="error",
    show_default=True,
    help="Severity from which the exit code is 1.",
)
