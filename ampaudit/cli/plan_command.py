"""``ampaudit plan``: shows what a policy does, op by op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ampaudit.audit.config import PlanConfig
from ampaudit.cli.loading import load_source
from ampaudit.cli.options import FirstRankCommand, config_from, config_options, report_options
from ampaudit.cli.output import deliver_document
from ampaudit.cli.progress import ProgressBar
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.policy import load_policy
from ampaudit.render.render import keeping

if TYPE_CHECKING:
    from ampaudit.report.plan import PlanReport


@click.command("plan", cls=FirstRankCommand)
@click.argument("model")
@config_options(PlanConfig, SourceConfig)
@click.option("--layer", metavar="GLOB", help="Show only matching layers, such as 'encoder.layer.0.*'.")
@report_options("plan", "Show one row per site, including views.")
def plan_command(model: str, **options: Any) -> None:
    """Show each op's precision and the rule behind it, with casts, bytes and weight memory.

    MODEL is what ``ampaudit scan`` takes. Nothing runs in 16 bits; a policy with measured rules needs one
    FP32 run.
    """
    rules = load_policy(options["policy"])  # early, to report mistakes in it before torch is loaded
    with ProgressBar(model) as progress:
        config = config_from(PlanConfig, options, policy=rules)
        config.check()
        source = load_source(model, config_from(SourceConfig, options))

        from ampaudit.audit.plan import plan

        report = plan(source, config=config, session=Session(progress.update))
    if (layer := options["layer"]) is not None:
        report = _select_layers(report, layer)
    deliver_document(report, options)


def _select_layers(plan: PlanReport, glob: str) -> PlanReport:
    """Return a plan of the layers that a glob matches."""
    import difflib

    from ampaudit.core.text import escape_control

    if report := plan.select_layers(glob):
        return report
    layers = sorted({site.layer for site in plan.sites})
    near = difflib.get_close_matches(glob, layers, n=1, cutoff=0.3)
    suggestion = f"; there is {escape_control(near[0])!r}" if near else ""
    with keeping(plan):
        text = f"no layer matches {glob!r}{suggestion}; * matches any text"
        raise click.BadParameter(text, param_hint="--layer")
