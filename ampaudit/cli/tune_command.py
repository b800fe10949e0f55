"""``ampaudit tune``: finds the fewest ops that must stay in float32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.cli.options import (
    GroupedCommand,
    among_ranks,
    config_from,
    config_options,
    file_option,
    plot_option,
    report_options,
)
from ampaudit.cli.output import deliver_document
from ampaudit.cli.progress import ProgressBar
from ampaudit.cli.terminal import print_notes
from ampaudit.core.errors import UsageError
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.render.render import keeping
from ampaudit.tuning.config import TuneConfig

if TYPE_CHECKING:
    from ampaudit.parallel.ranks import RankShare
    from ampaudit.report.tuning import TuningReport

_RULE_SUFFIXES = (".yaml", ".yml")


@click.command("tune", cls=GroupedCommand)
@click.argument("model")
@config_options(TuneConfig, SourceConfig, leave_out=("stream",))
@file_option("--policy-file", "tuned_policy", metavar="FILE", help="Write the policy to FILE.")
@plot_option("accuracy against the share of ops in float32")
@report_options("tuning", "Show every op, and everything that was tried.", also=_RULE_SUFFIXES)
@click.pass_context
def tune_command(context: click.Context, /, model: str, **options: Any) -> None:
    """Find the fewest ops of MODEL that must stay in float32 for a required accuracy.

    MODEL is what ``ampaudit scan`` takes. Everything else runs and is stored in 16 bits. The result is a rule
    file: ``-o policy.yaml`` writes it, and ``scan``, ``convert`` and ``check`` take it as ``--policy``.
    Exit code 1 if no choice of ops has that accuracy.
    """
    output: Path | None = options["output"]
    if output is not None and output.suffix.lower() in _RULE_SUFFIXES:
        if options["tuned_policy"] is not None:
            raise UsageError("-o and --policy-file both name a rule file", hint="leave one out")
        options["tuned_policy"], options["output"] = output, None
    with among_ranks() as share:
        report = _tune(model, options, share)
        deliver_document(report, options)
        _write(report, options)
        context.exit(report.exit_code)


def _tune(location: str, options: dict[str, Any], share: RankShare | None) -> TuningReport:
    with ProgressBar(location) as progress:
        config = config_from(TuneConfig, options)
        config.check()

        from ampaudit.cli.loading import load_source
        from ampaudit.tuning.tune import tune

        source = load_source(location, config_from(SourceConfig, options))
        if share is not None:
            from ampaudit.parallel.identity import identity_of

            share.describe(location, identity_of(source, [], config))
        return tune(source, config=config, session=Session(progress.update, share))


def _write(report: TuningReport, options: dict[str, Any]) -> None:
    """Write the rule file and the picture; a policy that falls short is not written."""
    from ampaudit.core.files import write_text

    path, plot = options["tuned_policy"], options["plot"]
    if path is not None and not report.reached:
        print_notes(f"no policy written to {path}: the accuracy is not reached")
    elif path is not None:
        with keeping(report):
            write_text(path, report.policy, force=options["force"])
        use = "" if report.dtype == "float16" else f"; use it with --dtype {report.dtype}"
        print_notes(f"policy written to {path}{use}")
    if plot is not None:
        from ampaudit.views.tuning_plot import plot_tuning

        with keeping(report):
            plot_tuning(report, plot, force=options["force"])
        print_notes(f"picture written to {plot}")
