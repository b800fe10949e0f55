"""``ampaudit plan``: shows what a policy does, op by op."""

from __future__ import annotations

from typing import Any

import click

from ampaudit.audit.config import PlanConfig
from ampaudit.cli.loading import load_source
from ampaudit.cli.options import (
    config_from,
    config_options,
    debug_option,
    force_option,
    output_option,
    report_format_option,
    verbose_option,
)
from ampaudit.cli.output import deliver
from ampaudit.core.config import SourceConfig

__all__ = ["plan_command"]


@click.command("plan")
@click.argument("model")
@config_options(PlanConfig, SourceConfig)
@click.option("--layer", metavar="GLOB", help="Show only matching layers, such as 'encoder.layer.0.*'.")
@report_format_option("text", "json", "html", "markdown", "csv")
@output_option
@force_option
@verbose_option("Show one row per site, including views.")
@debug_option
def plan_command(model: str, **options: Any) -> None:
    """Show each op's precision and the rule behind it, with casts, bytes and weight memory.

    MODEL is what ``ampaudit scan`` takes. Nothing is run in 16 bits; a policy with measured rules is given
    one FP32 run.
    """
    from ampaudit.cli.progress import ProgressBar
    from ampaudit.core.files import check_writable
    from ampaudit.policy import load_policy

    if options["output"] is not None:
        check_writable(options["output"], force=options["force"])
    rules = load_policy(options["policy"])  # its mistakes show before torch is loaded
    with ProgressBar(model) as progress:
        config = config_from(PlanConfig, options, policy=rules, on_progress=progress.update)
        source = load_source(model, config_from(SourceConfig, options))

        from ampaudit.audit.plan import plan

        made = plan(source, config=config)
    from ampaudit.render.documents.plan import PlanView
    from ampaudit.render.formats import chosen_format
    from ampaudit.render.render import as_file
    from ampaudit.render.terminal import printable

    layer = options["layer"]
    if layer is not None and not made.matching(layer):
        raise click.BadParameter(
            _no_layer(layer, sorted({s.layer for s in made.sites})), param_hint="--layer"
        )
    form = chosen_format(options["form"], options["output"])
    text = None if form == "text" else as_file(made, form)
    shown = printable(PlanView(made, layer).sections(int(options["verbose"])))
    deliver(lambda console: console.print(shown), text, options["output"], force=options["force"])


def _no_layer(glob: str, layers: list[str]) -> str:
    import difflib

    from ampaudit.core.text import escape_control

    near = difflib.get_close_matches(glob, layers, n=1, cutoff=0.3)
    meant = f"; there is {escape_control(near[0])!r}" if near else ""
    return f"no layer matches {glob!r}{meant}; a star stands for any text"
