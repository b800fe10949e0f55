"""``ampaudit bench``: time, memory and accuracy of each mode, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.cli.common_options import (
    debug_option,
    device_option,
    dtype_option,
    output_option,
    report_format_option,
)
from ampaudit.cli.output import deliver_document

if TYPE_CHECKING:
    from ampaudit.report.bench import BenchReport

__all__ = ["bench_command"]

_FILE = click.Path(path_type=Path)
DEFAULT_MODES = "fp32,tf32,autocast,half,bf16,converted"


@click.command("bench", short_help="Measure what 16 bits buy: time, memory, accuracy.")
@click.argument("model")
@click.option("--train", is_flag=True, help="Training steps instead of forward passes.")
@click.option("--modes", default=DEFAULT_MODES, show_default=True, help="Also: converted+compile.")
@click.option("--batch-size", "sizes", metavar="N[,N]", help="Sizes of batches.  [default: the model file's]")
@click.option("--for", "target", metavar="DEVICE", help="Estimate the time on a device: ampaudit devices.")
@click.option("--max-batch", is_flag=True, help="Search for the largest batch; on a CPU, with --for.")
@click.option("--plot", type=_FILE, metavar="FILE", help="Draw memory and speed: .png, .svg or .pdf.")
@click.option(
    "--repeats", type=click.IntRange(1), default=10, show_default=True, help="Timed steps of each mode."
)
@click.option("--policy", default="ampaudit", show_default=True, help="Policy of conversions.")
@dtype_option
@device_option
@click.option("--weights", type=_FILE, metavar="FILE", help="Checkpoint to load.")
@click.option("--inputs", type=_FILE, metavar="FILE", help="Python file with example_inputs() or batches().")
@click.option("--seed", type=int, default=0, show_default=True)
@report_format_option
@output_option
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@debug_option
@click.pass_context
def bench_command(context: click.Context, /, model: str, **options: Any) -> None:
    """Run MODEL in each mode, in turns, and print what each costs beside what it computes.

    MODEL is what ``ampaudit scan`` takes; --train needs what ``ampaudit train`` needs. A mode that the device
    lacks, or that runs out of memory, is a row of the table. Exit code 3 if none ran.
    """
    from ampaudit.core.files import check_writable

    for path in (options["output"], options["plot"]):
        if path is not None:
            check_writable(path, force=options["force"])
    if options["plot"] is not None:
        from ampaudit.render.training_plot import check_picture

        check_picture(options["plot"])
    report = _measured(model, options)
    _deliver(report, options)
    context.exit(130 if report.interrupted else report.exit_code)


def _measured(location: str, options: dict[str, Any]) -> BenchReport:
    from ampaudit.bench.devices.catalogue import device_named
    from ampaudit.bench.names import parse_modes
    from ampaudit.cli.progress import ProgressBar
    from ampaudit.policy import load_policy

    sizes, modes = _sizes(options["sizes"]), parse_modes(options["modes"])
    target = device_named(options["target"]) if options["target"] is not None else None
    policy = load_policy(options["policy"])  # its mistakes show before torch is loaded
    with ProgressBar(location) as progress:
        from ampaudit.bench.run import BenchSettings, bench_source
        from ampaudit.source.interface import SourceOptions
        from ampaudit.source.open import open_source

        chosen = {name: options[name] for name in ("seed", "weights", "inputs", "train")}
        settings = BenchSettings(
            modes=modes,
            sizes=sizes,
            policy=policy,
            dtype=options["dtype"],
            device=options["device"],
            train=options["train"],
            repeats=options["repeats"],
            seed=options["seed"],
            target=target,
            max_batch=options["max_batch"],
            progress=progress.update,
        )
        return bench_source(open_source(location, SourceOptions(**chosen)), settings)


def _sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise click.UsageError(f"--batch-size {text}: give whole numbers from 1 on, such as 8,32")
    return tuple(dict.fromkeys(sizes))


def _deliver(report: BenchReport, options: dict[str, Any]) -> None:
    if options["plot"] is not None:
        from ampaudit.render.bench_plot import plot_bench

        plot_bench(report, options["plot"], force=options["force"])
        click.echo(f"picture written to {options['plot']}", err=True)
    deliver_document(report, options)
