"""``ampaudit convert`` and ``ampaudit verify``: options in, a directory or a verdict out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ampaudit.cli.common_options import (
    debug_option,
    device_option,
    dtype_option,
    format_option,
    ignore_option,
)
from ampaudit.cli.model_options import load_source, model_options
from ampaudit.cli.output import deliver_document
from ampaudit.core.pyproject import LEVELS

__all__ = ["convert_command", "verify_command"]

_FILE = click.Path(path_type=Path)


@click.command("convert", short_help="Write a converted checkpoint.")
@click.argument("model")
@click.option("-o", "--output", type=_FILE, required=True, metavar="DIR", help="Directory to write.")
@click.option("--policy", default="ampaudit", show_default=True, help="Policy name or rule file.")
@dtype_option
@click.option(
    "--mode",
    type=click.Choice(["inference", "train"]),
    default="inference",
    show_default=True,
    help="Fold casts into stored weights; or keep FP32 masters, and the casts in the graph.",
)
@click.option("--no-masters", is_flag=True, help="Do not keep the FP32 weights: halves the directory.")
@click.option("--no-program", is_flag=True, help="Do not write model.pt2.")
@click.option("--onnx", is_flag=True, help="Write model.onnx, too, and run it beside torch.")
@click.option(
    "--to", "target", type=click.Choice(["float32"]), help="MODEL is a converted directory: undo it."
)
@device_option
@model_options
@click.option(
    "--fail-on",
    type=click.Choice(LEVELS),
    default="error",
    show_default=True,
    help="Severity of a finding from which nothing is written, and the exit code is 1.",
)
@ignore_option
@format_option
@click.option("--force", is_flag=True, help="Replace DIR, if ampaudit wrote it.")
@debug_option
@click.pass_context
def convert_command(context: click.Context, /, model: str, output: Path, **options: Any) -> None:
    """Audit MODEL, and write its converted checkpoint if nothing breaks.

    \b
    MODEL is what ``ampaudit scan`` takes, or weights alone, which are converted by name and shape:
      weights.safetensors, model.safetensors.index.json, state_dict.pt
    DIR then holds
      model.safetensors      working weights, in the dtypes of the plan
      master.safetensors     what they were rounded from
      model.pt2              the exported program, with the casts in it
      model.onnx             the same for ONNX (--onnx)
      plan.yaml              the decisions, as a rule file
      report.json            the audit
      reference.safetensors  inputs, and what the program computes from them
      manifest.json          SHA-256 of every file
    """  # noqa: D301  (click wants the character, not its escape)
    if options["target"] is not None:
        _restore(model, output, options)
        return
    from ampaudit.export.options import ConvertOptions

    chosen = ConvertOptions(
        policy=options["policy"],
        dtype=options["dtype"],
        mode=options["mode"],
        masters=not options["no_masters"],
        program=not options["no_program"],
        onnx=options["onnx"],
        force=options["force"],
        weights=options["weights"],
    )
    chosen.check(output)
    made = _convert(model, output, chosen, options, context)
    deliver_document(made, {"form": options["form"]})
    context.exit(made.exit_code)


def _convert(model: str, output: Path, chosen: Any, options: dict[str, Any], context: click.Context) -> Any:
    from ampaudit.cli.progress import ProgressBar
    from ampaudit.export.convert_weights import convert_weights, is_checkpoint

    with ProgressBar(model) as progress:
        if is_checkpoint(model):
            return convert_weights(Path(model), output, chosen)

        from ampaudit.audit.settings import Settings
        from ampaudit.export.convert import convert_source

        source = load_source(model, options)
        settings = Settings(
            device=options["device"],
            seed=options["seed"],
            fail_on=options["fail_on"],
            ignore=options["ignore"],
            progress=progress.update,
        )
        audited, made = convert_source(source, output, chosen, settings)
    if made is None:
        # the output is the directory, which was not written
        deliver_document(audited.report, {"form": options["form"]})
        click.echo(f"nothing was written to {output}; --fail-on never writes it all the same", err=True)
        context.exit(audited.report.exit_code)
    return made


def _restore(model: str, output: Path, options: dict[str, Any]) -> None:
    from ampaudit.core.text import format_bytes
    from ampaudit.export.restore import restore

    made = restore(Path(model), output, force=options["force"])
    size = format_bytes(sum(record.size for record in made.files.values()))
    click.echo(f"restored {len(made.tensors)} tensors ({size}) to {output}; each is what it was, bit for bit")


@click.command("verify", short_help="Check a converted directory.")
@click.argument("directory", type=_FILE)
@click.option("--no-run", is_flag=True, help="Only compare files; do not load and run the program.")
@click.option(
    "--tolerance",
    type=float,
    metavar="DB",
    help="Agreement asked for where bits differ.  [default: 40 for float16, 25 for bfloat16]",
)
@format_option
@click.option("-v", "--verbose", is_flag=True, help="Every problem.")
@debug_option
@click.pass_context
def verify_command(context: click.Context, /, directory: Path, **options: Any) -> None:
    """Say whether a converted DIRECTORY is what was written, and still computes what it did.

    Hashes of all files, each tensor against its master, and the program, loaded in a fresh process and run
    on the recorded inputs. Exit code 1 if anything differs, and each difference is named.
    """
    from ampaudit.cli.progress import ProgressBar
    from ampaudit.export.verify import verify

    with ProgressBar(str(directory)):
        found = verify(directory, run=not options["no_run"], tolerance_db=options["tolerance"])
    deliver_document(found, options)
    context.exit(found.exit_code)
