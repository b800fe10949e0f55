"""``ampaudit train``: compares training in FP32 and 16 bits."""

from __future__ import annotations

from typing import Any

import click

from ampaudit.cli.options import (
    FirstRankCommand,
    config_from,
    config_options,
    debug_option,
    file_option,
    output_options,
    plot_option,
    quiet_option,
    verbose_option,
)
from ampaudit.cli.output import deliver_document
from ampaudit.cli.progress import ProgressBar
from ampaudit.cli.terminal import print_notes
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.policy import load_policy
from ampaudit.render.render import keeping
from ampaudit.training.config import TrainConfig


@click.command("train", cls=FirstRankCommand)
@click.argument("model")
@config_options(TrainConfig, SourceConfig, leave_out=("batches", "train", "stream"))
@output_options("training")
@plot_option("the curves")
@file_option("--tensorboard", metavar="DIR", help="Write TensorBoard summaries to DIR.")
@quiet_option
@verbose_option("Show notes and every parameter.")
@debug_option
@click.pass_context
def train_command(context: click.Context, /, model: str, **options: Any) -> None:
    """Train MODEL in FP32, with torch.amp and under policies, from the same start on the same batches.

    \b
    The model file has get_model() and batches(), and
      loss(output) or loss(output, batch)   unless the output is or has the loss
      model_inputs(batch)                   where the model takes only a part of a batch
      optimizer(params)                     else AdamW with a learning rate of 1e-3
      metric(output, batch)                 optional: larger is better
    """  # noqa: D301  (click wants the character, not its escape)
    config = config_from(TrainConfig, options)
    config = config.changed(policies=[load_policy(str(name)) for name in config.policies])
    with ProgressBar(model) as progress:
        config.check()

        from ampaudit.source.open import open_source
        from ampaudit.training.train import MAX_BATCHES, train

        loading = config_from(SourceConfig, options, batches=min(config.steps, MAX_BATCHES), train=True)
        report = train(open_source(model, loading), config=config, session=Session(progress.update))
    deliver_document(report, options)
    if options["plot"] is not None:
        from ampaudit.views.training_plot import plot_training

        with keeping(report):
            plot_training(report, options["plot"], force=options["force"])
        print_notes(f"picture written to {options['plot']}")
    if options["tensorboard"] is not None:
        from ampaudit.training.tensorboard import write_summaries

        with keeping(report):
            write_summaries(report, options["tensorboard"], force=options["force"])
        print_notes(f"summaries written to {options['tensorboard']}")
    context.exit(report.exit_code)
