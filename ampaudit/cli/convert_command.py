"""``ampaudit convert`` and ``ampaudit verify``."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ampaudit.cli.loading import load_source
from ampaudit.cli.options import (
    FILE,
    FirstRankCommand,
    config_from,
    config_options,
    debug_option,
    explicit_options,
    file_option,
    format_option,
    report_options,
)
from ampaudit.cli.output import deliver_document
from ampaudit.cli.progress import ProgressBar
from ampaudit.cli.terminal import print_notes
from ampaudit.core.errors import UsageError
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe
from ampaudit.export.config import ConvertConfig, VerifyConfig

if TYPE_CHECKING:
    from ampaudit.report.conversion import Conversion

_MODEL_OPTIONS = set("weights inputs batches train stream fail_on min_headroom min_sqnr ignore".split())


@click.command("convert", cls=FirstRankCommand)
@click.argument("model")
@file_option("-o", "--output", required=True, metavar="DIR", help="Directory to write.")
@config_options(ConvertConfig, SourceConfig)
@click.option(
    "--to",
    "target",
    type=click.Choice(["float32"]),
    help="Restore the FP32 weights of MODEL, a converted directory.",
)
@format_option("conversion")
@debug_option
@click.pass_context
def convert_command(context: click.Context, /, model: str, output: Path, **options: Any) -> None:
    """Audit MODEL, and write its converted checkpoint if nothing breaks.

    \b
    MODEL is what ``ampaudit scan`` takes, or weights alone, which are converted by name and shape:
      weights.safetensors, model.safetensors.index.json, state_dict.pt
    DIR then holds
      model.safetensors      working weights, in the dtypes of the plan
      master.safetensors     the weights before rounding
      model.pt2              the exported program, with the casts in it
      model.onnx             the program as ONNX (--onnx)
      plan.yaml              the decisions, as a rule file
      report.json            the audit
      reference.safetensors  inputs, and the program's outputs
      manifest.json          SHA-256 of every file

    \b
    An .onnx file is converted as a graph, by default under the policy strongly-typed; DIR then holds
      model.onnx             the converted graph (and model.onnx.data, above a gigabyte)
      plan.yaml, report.json, manifest.json
    """  # noqa: D301  (click wants the character, not its escape)
    if options["target"] is not None:
        _refuse(
            "--to float32 restores the stored weights",
            explicit_options(options).keys() - {"target", "force", "debug"},
        )

        from ampaudit.core.text import format_bytes
        from ampaudit.export.restore import restore

        with ProgressBar(model) as progress:
            manifest = restore(Path(model), output, force=options["force"], on_progress=progress.update)
        size = format_bytes(sum(record.size for record in manifest.files.values()))
        click.echo(f"restored {len(manifest.tensors)} tensors ({size}) to {output}, bit for bit")
        return
    conversion = _convert(model, output, options, context)
    deliver_document(conversion, options | {"output": None, "force": False})
    context.exit(conversion.exit_code)


def _convert(model: str, output: Path, options: dict[str, Any], context: click.Context) -> Conversion:
    from ampaudit.export.weights import convert_weights, is_checkpoint

    if context.get_parameter_source("policy") is ParameterSource.DEFAULT:
        # the kind of model determines the default
        options = {name: value for name, value in options.items() if name != "policy"}
    with ProgressBar(model) as progress:
        config = config_from(ConvertConfig, options)
        config.check_output(output)
        session = Session(progress.update)
        if is_checkpoint(model):
            _refuse(
                f"{describe(model)} has weights, but no model",
                explicit_options(options).keys() & _MODEL_OPTIONS,
            )
            return convert_weights(Path(model), output, config, session)

        from ampaudit.export.convert import convert

        source = load_source(model, config_from(SourceConfig, options))
        report, conversion = convert(source, None, output, config=config, session=session)
    if conversion is None:
        deliver_document(report, {"form": options["form"]})  # without --output, which names the directory
        print_notes(f"nothing was written to {output}; pass --fail-on never to write it anyway")
        context.exit(report.exit_code)
    return conversion


def _refuse(why: str, unused: Set[str]) -> None:
    """Reject options that would have no effect."""
    for parameter in click.get_current_context().command.params:
        if parameter.name in unused:
            flag = parameter.opts[-1]
            raise UsageError(f"{why}: {flag} has no effect", hint=f"leave out {flag}")


@click.command("verify")
@click.argument("directory", type=FILE)
@config_options(VerifyConfig)
@report_options("verification", "Show every problem.", quiet=False)
@click.pass_context
def verify_command(context: click.Context, /, directory: Path, **options: Any) -> None:
    """Verify that a converted DIRECTORY is unchanged and computes its recorded outputs.

    Compares each file with its hash and each tensor with its master, then runs the program on the
    recorded inputs, in a sandbox. Lists the differences; exit code 1 if there are any.
    """
    from ampaudit.export.verify import verify

    with ProgressBar(str(directory)) as progress:
        config = config_from(VerifyConfig, options)
        verification = verify(directory, config=config, session=Session(progress.update))
    deliver_document(verification, options)
    context.exit(verification.exit_code)
