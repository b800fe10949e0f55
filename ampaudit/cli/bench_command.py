"""``ampaudit bench``: compares time, memory and accuracy of modes."""

from __future__ import annotations

from typing import Any

import click

from ampaudit.benchmarking.config import BenchConfig
from ampaudit.cli.options import FirstRankCommand, config_from, config_options, plot_option, report_options
from ampaudit.cli.output import deliver_document
from ampaudit.cli.progress import ProgressBar
from ampaudit.cli.terminal import print_notes
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.policy import load_policy
from ampaudit.render.render import keeping


@click.command("bench", cls=FirstRankCommand)
@click.argument("model")
@config_options(BenchConfig, SourceConfig, leave_out=("batches", "stream"))
@plot_option("memory and speed")
@report_options("bench")
@click.pass_context
def bench_command(context: click.Context, /, model: str, **options: Any) -> None:
    """Run MODEL in each mode, alternating between them, and compare time, memory and accuracy.

    MODEL is what ``ampaudit scan`` takes; --train needs what ``ampaudit train`` needs. A mode that the device
    does not support, or that runs out of memory, has a row as well. Exit code 3 if no mode ran.
    """
    policy = load_policy(options["policy"])  # early, to report mistakes in it before torch is loaded
    with ProgressBar(model) as progress:
        config = config_from(BenchConfig, options, policy=policy)
        config.check()

        from ampaudit.benchmarking.run import bench
        from ampaudit.source.open import open_source

        source = open_source(model, config_from(SourceConfig, options))
        report = bench(source, config=config, session=Session(progress.update))
    deliver_document(report, options)
    if options["plot"] is not None:
        from ampaudit.views.training_plot import plot_bench

        with keeping(report):
            plot_bench(report, options["plot"], force=options["force"])
        print_notes(f"picture written to {options['plot']}")
    context.exit(130 if report.interrupted else report.exit_code)
