"""``ampaudit check``: checks targets against budgets."""

from __future__ import annotations

from typing import Any

import click

from ampaudit.ci.config import CheckConfig, read_config
from ampaudit.cli.options import (
    GroupedCommand,
    among_ranks,
    config_from,
    config_options,
    configuration_option,
    explicit_options,
    report_options,
)
from ampaudit.cli.output import deliver_document
from ampaudit.cli.progress import ProgressBar
from ampaudit.core.session import Session


@click.command("check", cls=GroupedCommand)
@click.argument("targets", nargs=-1)
@config_options(CheckConfig)
@configuration_option
@report_options("check")
@click.pass_context
def check_command(context: click.Context, /, targets: tuple[str, ...], **options: Any) -> None:
    """Check TARGETS against budgets: model files, converted directories, .pt2 and .onnx files.

    Each runs in its own process. Options come from the command line, then from [tool.ampaudit] in
    pyproject.toml. Exit codes: 0 all pass, 1 a budget is exceeded, 2 bad input, 3 not audited.
    """
    from ampaudit.core.pyproject import find_config

    path = options["config"] or find_config()
    values = (read_config(path) if path is not None else {}) | explicit_options(options)
    locations = targets or tuple(values.get("targets", ()))
    what = f"{len(locations)} targets" if len(locations) != 1 else locations[0]
    with among_ranks() as share:
        with ProgressBar(what) as progress:
            from ampaudit.ci.check import check

            config = config_from(CheckConfig, values)
            results = check(locations, config=config, session=Session(progress.update))
        if share is not None:
            share.finish()
        deliver_document(results, options)
        context.exit(results.exit_code)
