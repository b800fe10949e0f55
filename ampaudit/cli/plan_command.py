"""``ampaudit plan``: what a policy would do, op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ampaudit.cli.common_options import debug_option, device_option, dtype_option, format_option
from ampaudit.cli.model_options import load_source, model_options
from ampaudit.cli.output import deliver

__all__ = ["plan_command"]


@click.command("plan", short_help="Show what a policy does to each op.")
@click.argument("model")
@click.option("--policy", default="ampaudit", show_default=True, help="Policy name or rule file.")
@dtype_option
@device_option
@click.option("--layer", metavar="GLOB", help="Only layers that match, such as 'encoder.layer.0.*'.")
@model_options
@format_option
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to FILE.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("-v", "--verbose", is_flag=True, help="One row per site, views too.")
@debug_option
def plan_command(model: str, **options: Any) -> None:
    """Print each op's precision, the rule that decided and why, casts, bytes, and weights memory.

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
        source = load_source(model, options)

        from ampaudit.audit.plan import plan_source

        plan = plan_source(
            source,
            rules,
            options["dtype"],
            device=options["device"],
            seed=options["seed"],
            progress=progress.update,
        )
    from ampaudit.render.documents.plan import PlanView
    from ampaudit.render.json import to_json
    from ampaudit.render.terminal import printable

    layer = options["layer"]
    if layer is not None and not plan.matching(layer):
        raise click.BadParameter(
            _no_layer(layer, sorted({s.layer for s in plan.sites})), param_hint="--layer"
        )
    json = to_json(plan) if options["form"] == "json" else None
    shown = printable(PlanView(plan, layer).sections(int(options["verbose"])))
    deliver(lambda console: console.print(shown), json, options["output"], force=options["force"])


def _no_layer(glob: str, layers: list[str]) -> str:
    import difflib

    from ampaudit.core.text import escape_control

    near = difflib.get_close_matches(glob, layers, n=1, cutoff=0.3)
    meant = f"; there is {escape_control(near[0])!r}" if near else ""
    return f"no layer matches {glob!r}{meant}; a star stands for any text"
