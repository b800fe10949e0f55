"""``ampaudit train``: options in, report and picture out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.cli.common_options import (
    debug_option,
    device_option,
    dtype_option,
    fail_on_option,
    output_option,
    policies_option,
    report_format_option,
)
from ampaudit.cli.output import deliver_document

if TYPE_CHECKING:
    from ampaudit.report.training import TrainingReport

__all__ = ["train_command"]

_FILE = click.Path(path_type=Path)


@click.command("train", short_help="Train in FP32 and 16 bits side by side.")
@click.argument("model")
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True, help="Steps of each run.")
@policies_option
@dtype_option
@click.option(
    "--loss-scale", metavar="NAME|X", help="A profile (torch, deepspeed, one ...) or a fixed scale."
)
@click.option(
    "--every", type=click.IntRange(1), default=10, show_default=True, help="Watch one step of so many."
)
@device_option
@click.option("--weights", type=_FILE, metavar="FILE", help="Checkpoint to start from.")
@click.option("--inputs", type=_FILE, metavar="FILE", help="Python file with batches().")
@click.option("--seed", type=int, default=0, show_default=True)
@report_format_option
@output_option
@click.option("--plot", type=_FILE, metavar="FILE", help="Draw the curves: .png, .svg or .pdf.")
@click.option("--tensorboard", type=_FILE, metavar="DIR", help="Write TensorBoard summaries to DIR.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@fail_on_option
@click.option("-q", "--quiet", is_flag=True, help="Only the verdict.")
@click.option("-v", "--verbose", is_flag=True, help="Notes and every parameter, too.")
@debug_option
@click.pass_context
def train_command(context: click.Context, /, model: str, **options: Any) -> None:
    """Train MODEL in FP32, with torch.amp and under policies, from the same start on the same batches.

    \b
    The model file has get_model() and batches(), and
      loss(output) or loss(output, batch)   unless the output is the loss
      model_inputs(batch)                   where the model takes only a part of a batch
      optimizer(params)                     else AdamW with a learning rate of 1e-3
      metric(output, batch)                 optional: larger is better
    """  # noqa: D301  (click wants the character, not its escape)
    from ampaudit.core.files import check_writable

    for path in (options["output"], options["plot"]):
        if path is not None:
            check_writable(path, force=options["force"])
    if options["plot"] is not None:
        from ampaudit.render.training_plot import check_picture

        check_picture(options["plot"])
    report = _trained(model, options)
    _deliver(report, options)
    context.exit(report.exit_code)


def _trained(location: str, options: dict[str, Any]) -> TrainingReport:
    from ampaudit.cli.progress import ProgressBar
    from ampaudit.policy import load_policy

    policies = [load_policy(name.strip()) for name in options["policy"].split(",")]
    with ProgressBar(location) as progress:
        from ampaudit.source.interface import SourceOptions
        from ampaudit.source.open import open_source
        from ampaudit.training.train import MAX_BATCHES, TrainSettings, train_source

        names = ("seed", "weights", "inputs")
        count = min(options["steps"], MAX_BATCHES)
        chosen = {name: options[name] for name in names}
        source = open_source(location, SourceOptions(batches=count, train=True, **chosen))
        settings = TrainSettings(
            steps=options["steps"],
            policies=policies,
            dtype=options["dtype"],
            device=options["device"],
            loss_scale=_scale(options["loss_scale"]),
            every=options["every"],
            seed=options["seed"],
            fail_on=options["fail_on"],
            progress=progress.update,
        )
        return train_source(source, settings)


def _scale(given: str | None) -> str | float | None:
    """A number, or the name of a profile."""
    try:
        value = None if given is None else float(given)
    except ValueError:
        return given
    if value is not None and not 0 < value < float("inf"):
        raise click.UsageError("--loss-scale must be positive and finite")
    return value


def _deliver(report: TrainingReport, options: dict[str, Any]) -> None:
    if options["plot"] is not None:
        from ampaudit.render.training_plot import plot_training

        plot_training(report, options["plot"], force=options["force"])
        click.echo(f"picture written to {options['plot']}", err=True)
    if options["tensorboard"] is not None:
        from ampaudit.training.tensorboard import write_summaries

        write_summaries(report, options["tensorboard"], force=options["force"])
        click.echo(f"summaries written to {options['tensorboard']}", err=True)
    deliver_document(report, options)
