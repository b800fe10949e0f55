"""``ampaudit scan``: options in, report out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ampaudit.cli.common_options import (
    debug_option,
    device_option,
    dtype_option,
    fail_on_option,
    ignore_option,
    output_option,
    policies_option,
    report_format_option,
)
from ampaudit.cli.model_options import load_source, model_options
from ampaudit.cli.output import deliver_document
from ampaudit.core.text import escape_control

if TYPE_CHECKING:
    from ampaudit.core.errors import AuditError
    from ampaudit.policy import RuleSet
    from ampaudit.report.comparison import Comparison
    from ampaudit.report.model import Report

    Audits = tuple[list[Report], list[tuple[str, AuditError]]]

__all__ = ["scan_command"]

_FILE = click.Path(path_type=Path)


@click.command("scan", short_help="Name the layers that overflow.")
@click.argument("model")
@policies_option
@dtype_option
@click.option("--ranges", is_flag=True, help="One FP32 run only: what every format would do to its values.")
@device_option
@model_options
@report_format_option
@output_option
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@fail_on_option
@click.option(
    "--min-headroom", type=float, default=1.0, show_default=True, metavar="BITS", help="Warn below this."
)
@click.option(
    "--min-sqnr", type=float, default=20.0, show_default=True, metavar="DB", help="Accuracy asked for."
)
@click.option("--advise", is_flag=True, help="Try changes for each error; print those that cure it.")
@click.option("--diff", is_flag=True, help="Print rewrites as a diff of the source; implies --advise.")
@click.option(
    "--contract",
    default="",
    metavar="WORDS",
    help="Another way to compute: lower-accumulate, saturate, flush-to-zero, decomposed.",
)
@click.option("--backward", is_flag=True, help="Audit gradients, too, and the loss scale; implies --train.")
@click.option(
    "--loss-scale",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Multiply the loss by X instead of the policy's scale.",
)
@click.option("--prove", is_flag=True, help="Prove sites safe for every input in its range, too.")
@click.option(
    "--stress",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Search for inputs that overflow: N evaluations a site.",
)
@click.option("--static", is_flag=True, help="Proofs only: nothing is run.")
@click.option(
    "--assume", multiple=True, metavar="INPUT=LOW:HIGH", help="An input's range, for proofs; 'input' is all."
)
@ignore_option
@click.option("-q", "--quiet", is_flag=True, help="Only the verdict.")
@click.option("-v", "--verbose", is_flag=True, help="Notes and every site, too.")
@debug_option
@click.pass_context
def scan_command(context: click.Context, /, model: str, **options: Any) -> None:
    """Run MODEL in FP32 and in 16 bits side by side, and name what breaks.

    \b
    MODEL is one of
      file.py                  get_model() and example_inputs() in it
      file.py:factory          another function, or an nn.Module class
      package.module:factory   the same, from an import path
      directory/               a Hugging Face model: config.json and safetensors
      file.pt2                 an exported program
      directory/               what ``ampaudit convert`` wrote: scanned as it is
    """  # noqa: D301  (click wants the character, not its escape)
    from ampaudit.core.files import check_writable

    if options["output"] is not None:
        check_writable(options["output"], force=options["force"])
    reports, failures = _audit(model, options)
    document = _document(reports, compared=len(reports) + len(failures) > 1)
    deliver_document(document, options)
    for policy, failure in failures:
        lines = f"ampaudit: policy {policy}: {failure}".splitlines()
        click.echo("\n".join(escape_control(line) for line in lines), err=True)
    context.exit(max(document.exit_code, *(failure.exit_code for _, failure in failures), 0))


def _document(reports: list[Report], *, compared: bool) -> Report | Comparison:
    from ampaudit.report.comparison import Comparison

    return Comparison(tuple(reports)) if compared else reports[0]


def _each(audit: Callable[[list[RuleSet]], list[Report]], policies: list[RuleSet]) -> Audits:
    """All policies at once; where one cannot be audited, each alone, so that it hides none of the others."""
    from ampaudit.core.errors import CouldNotAudit

    try:
        return audit(policies), []
    except CouldNotAudit:
        if len(policies) == 1:
            raise
    reports: list[Report] = []
    failures: list[tuple[str, AuditError]] = []
    for policy in policies:
        try:
            reports += audit([policy])
        except CouldNotAudit as error:
            failures.append((policy.name, error))
    if not reports:
        raise failures[0][1]
    return reports, failures


def _audit(location: str, options: dict[str, Any]) -> Audits:
    from ampaudit.cli.progress import ProgressBar
    from ampaudit.policy import load_policy

    # their mistakes show before torch is loaded
    policies = [load_policy(name.strip()) for name in options["policy"].split(",")]
    if options["ranges"] and len(policies) > 1:
        raise click.UsageError("--ranges runs FP32 only: no policy makes a difference to it")
    if options["backward"] and not _is_given("train"):
        options = options | {"train": True}
    with ProgressBar(location) as progress:
        source = load_source(location, options)
        dtype = options["dtype"]
        if source.kind == "converted":  # its casts are in its program
            policies = policies if _is_given("policy") else [load_policy("as-is")]
            dtype = dtype if _is_given("dtype") else source.dtype or dtype

        from ampaudit.audit.scan import scan_policies

        audit = partial(
            scan_policies,
            source,
            dtype=dtype,
            device=options["device"],
            seed=options["seed"],
            ranges=options["ranges"],
            min_headroom=options["min_headroom"],
            min_sqnr=options["min_sqnr"],
            ignore=options["ignore"],
            advise=options["advise"],
            diff=options["diff"],
            stress=options["stress"],
            backward=options["backward"],
            loss_scale=options["loss_scale"],
            contract=options["contract"],
            prove=options["prove"] or bool(options["assume"]),
            static=options["static"],
            assume=options["assume"],
            fail_on=options["fail_on"],
            progress=progress.update,
        )
        return _each(lambda chosen: audit(policies=chosen), policies)


def _is_given(option: str) -> bool:
    """Whether an option stands on the command line."""
    source = click.get_current_context().get_parameter_source(option)
    return source is ParameterSource.COMMANDLINE
