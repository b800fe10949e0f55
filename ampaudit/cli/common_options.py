"""Options that several commands have, each once."""

from __future__ import annotations

import click

__all__ = ["debug_option", "device_option", "format_option", "ignore_option"]

format_option = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
debug_option = click.option("--debug", is_flag=True, help="Show Python tracebacks of errors.")
device_option = click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True
)
ignore_option = click.option(
    "--ignore", multiple=True, metavar="CODE[:LAYER]", help="Hide findings by code, and layer glob; repeat."
)
