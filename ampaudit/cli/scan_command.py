"""``ampaudit scan``: finds the layers that break in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.audit.config import ScanConfig, policies_of
from ampaudit.cli.loading import load_source
from ampaudit.cli.options import (
    GroupedCommand,
    among_ranks,
    config_from,
    config_options,
    explicit_options,
    file_option,
    report_options,
)
from ampaudit.cli.output import deliver_document
from ampaudit.cli.progress import ProgressBar
from ampaudit.cli.terminal import print_notes
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.findings.finding import Severity
from ampaudit.render.render import keeping

if TYPE_CHECKING:
    from ampaudit.core.errors import AuditError
    from ampaudit.parallel.identity import CommandShare
    from ampaudit.policy import RuleSet
    from ampaudit.report.model import Report

    Audits = tuple[list[Report], list[tuple[str, AuditError]]]


@click.command("scan", cls=GroupedCommand)
@click.argument("model")
@config_options(ScanConfig, SourceConfig)
@file_option("--advise-policy", metavar="FILE", help="Write one policy for all errors; implies --advise.")
@click.option("--part", metavar="N/COUNT", help="Run every COUNT-th batch, for 'ampaudit merge'; needs -o.")
@click.option("--pipeline", is_flag=True, help="Divide the model, not the batches, among torchrun's ranks.")
@file_option("--resume", metavar="DIR", help="Keep finished batches in DIR, and resume from them.")
@report_options("scan", "Show notes and every site.")
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
      file.onnx                an ONNX graph
      directory/               what ``ampaudit convert`` wrote: scanned as it is
    """  # noqa: D301  (click wants the character, not its escape)
    if options["part"] is not None:
        from ampaudit.cli.part import write_scan_part

        write_scan_part(scan_command, audit_location, model, options)
        return
    with among_ranks(pipeline=options["pipeline"]) as share:
        resumed = _with_resume(share, options)
        report_scan(context, model, options, resumed, explicit=explicit_options(options))


def report_scan(
    context: click.Context,
    model: str,
    options: dict[str, Any],
    share: CommandShare | None,
    *,
    explicit: Collection[str],
) -> None:
    """Scan a model, print the report, and exit with its code; ``explicit`` are the options that are set."""
    reports, failures = audit_location(model, options, share, explicit)
    from ampaudit.report.model import Comparison

    document = Comparison(tuple(reports)) if len(reports) + len(failures) > 1 else reports[0]
    deliver_document(document, options)
    if options["advise_policy"] is not None:
        _write_policy(reports[0], options["advise_policy"], force=options["force"])
    for policy, failure in failures:
        print_notes(*f"ampaudit: policy {policy}: {failure}".splitlines())
    context.exit(max(document.exit_code, *(failure.exit_code for _, failure in failures), 0))


def _with_resume(share: CommandShare | None, options: dict[str, Any]) -> CommandShare | None:
    """Return a share that resumes from the directory of ``--resume``, if it is set."""
    if options["resume"] is None:
        return share
    if options["pipeline"]:
        raise click.UsageError("--resume keeps whole batches, which --pipeline divides: leave one out")
    from ampaudit.parallel.resume import ResumedShare

    return ResumedShare(options["resume"], share)


def _write_policy(report: Report, path: Path, *, force: bool) -> None:
    """Write the policy for all errors, or say why there is none."""
    from ampaudit.core.files import write_text

    combined = report.combined
    if combined is None:
        why = "no rule cures any error" if report.count(Severity.ERROR) else "there is no error to cure"
        print_notes(f"no policy written to {path}: {why}")
        return
    with keeping(report):
        write_text(path, combined.saved_in(path.parent), force=force)
    remainder = f"; it leaves {', '.join(combined.left)}" if combined.left else ""
    print_notes(f"policy written to {path}{remainder}")


def _try_each(
    audit: Callable[[list[RuleSet]], list[Report]], policies: list[RuleSet], *, shared: bool
) -> Audits:
    """Audit all policies together; if one of them fails, audit each by itself, unless the work is shared.

    Shared work cannot be split: the records of other processes and of earlier runs are for all policies.
    """
    from ampaudit.core.errors import CouldNotAudit

    try:
        return audit(policies), []
    except CouldNotAudit:
        if shared or len(policies) == 1:
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


def audit_location(
    location: str, options: dict[str, Any], share: CommandShare | None, explicit: Collection[str]
) -> Audits:
    """Load a model and audit it under each policy."""
    policies = policies_of(options["policy"])  # early, to report mistakes in them before torch is loaded
    if options["ranges"] and len(policies) > 1:
        raise click.UsageError("--ranges runs FP32 only, where policies do not differ: leave out --policy")
    if options["advise_policy"] is not None:
        if len(policies) > 1:
            raise click.UsageError("--advise-policy writes one policy: scan under one --policy")
        if options["ranges"] or options["static"]:
            raise click.UsageError("--advise-policy needs a run in 16 bits: leave out --ranges and --static")
    loading = config_from(SourceConfig, options)
    with ProgressBar(location) as progress:
        config = config_from(ScanConfig, options)
        advise = config.advise or options["advise_policy"] is not None
        config = config.changed(advise=advise, prove=config.prove or bool(config.assume))
        config.check()
        if config.trains and "train" not in explicit:
            loading = loading.changed(train=True)
        loading = loading.changed(input_sizes=config.first_sizes)
        source = load_source(location, loading, limited=bool(config.memory))
        from ampaudit.audit.scan import as_converted, scan_policies

        if config.against is not None:
            from ampaudit.audit.inputs import open_against

            source = open_against(source, config.against, loading)
        policies, config = as_converted(source, policies, config, explicit)
        if share is not None:
            from ampaudit.parallel.identity import identity_of, refuse_undivided

            refuse_undivided(config)
            share.describe(location, identity_of(source, policies, config))
        session = Session(progress.update, share)
        return _try_each(
            lambda chosen: scan_policies(source, chosen, config, session), policies, shared=share is not None
        )
