"""``ampaudit rules``: lists, shows, validates and compares policies; only ``--model`` needs torch."""

from __future__ import annotations

import json
from typing import Any

import click

from ampaudit.audit.config import PlanConfig
from ampaudit.cli.loading import load_source
from ampaudit.cli.options import config_from, config_options, debug_option, format_option, verbose_option
from ampaudit.cli.output import print_result
from ampaudit.cli.terminal import print_notes
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig

__all__ = ["rules_group"]


@click.group("rules")
def rules_group() -> None:
    """Work with cast policies: YAML files that say which ops run in 16 bits, and why."""


@rules_group.command("list")
@format_option()
@debug_option
def list_command(form: str, debug: bool) -> None:
    """List the shipped policies."""
    from ampaudit.render.rules_text import list_rows, render_list

    rows = list_rows()
    print_result(render_list(rows), _json(rows, form))


@rules_group.command("show")
@click.argument("policy")
@format_option()
@debug_option
def show_command(policy: str, form: str, debug: bool) -> None:
    """Show a policy's rules in order, including inherited ones: a shipped name or a rule file."""
    from ampaudit.policy import load_file
    from ampaudit.render.rules_text import render_policy

    loaded = load_file(policy)
    data = loaded.file.model_dump(mode="json", exclude_defaults=True, by_alias=True)
    print_result(render_policy(loaded), _json(data, form))


@rules_group.command("validate")
@click.argument("file")
@debug_option
def validate_command(file: str, debug: bool) -> None:
    """Validate a rule file: exit code 0 if it is usable; warnings go to stderr."""
    from ampaudit.policy import load_file

    loaded = load_file(file)
    for warning in loaded.warnings:
        print_notes(f"warning: {warning}")
    ops = len(loaded.rules.op_names)
    click.echo(
        f"{loaded.path}: policy {loaded.file.name!r}, {len(loaded.file.rules)} rules about {ops} ops: valid"
    )


@rules_group.command("diff")
@click.argument("first")
@click.argument("second")
@click.option("--model", metavar="MODEL", help="Compare on this model, as ``ampaudit scan`` takes it.")
@config_options(PlanConfig, SourceConfig, leave_out=("policy", "device", "twins", "memory"))
@format_option()
@verbose_option("Show one row per site.")
@debug_option
def diff_command(first: str, second: str, model: str | None, form: str, **options: Any) -> None:
    """Show the ops that two policies treat differently, or with --model the layers."""
    from ampaudit.policy import load_policy

    a, b = load_policy(first), load_policy(second)
    if model is not None:
        _model_diff(a, b, model, form, options)
        return
    from ampaudit.core.formats import low_precision_format
    from ampaudit.render.rules_text import diff_rows, render_diff

    rows = diff_rows(a, b, low_precision_format(options["dtype"]).name)
    print_result(render_diff(a, b, rows, verbose=options["verbose"]), _json(rows, form))


def _model_diff(a: Any, b: Any, model: str, form: str, options: dict[str, Any]) -> None:
    from ampaudit.cli.progress import ProgressBar

    with ProgressBar(model) as progress:
        config = config_from(PlanConfig, options)
        config.check()
        source = load_source(model, config_from(SourceConfig, options))

        from ampaudit.audit.plan import plan

        session = Session(progress.update)
        plans = [plan(source, config=config, session=session, policy=policy) for policy in (a, b)]
    from ampaudit.render.documents.plan import plans_compared
    from ampaudit.render.json import to_json
    from ampaudit.render.terminal import printable

    data = {p.policy: json.loads(to_json(p)) for p in plans}
    content = printable(plans_compared(plans[0], plans[1], verbose=options["verbose"]))
    print_result(content, _json(data, form))


@rules_group.command("schema")
@debug_option
def schema_command(debug: bool) -> None:
    """Print the JSON Schema of rule files, for completion in editors."""
    from ampaudit.policy.schema import rules_schema_text

    click.echo(rules_schema_text(), nl=False)


def _json(data: Any, form: str) -> str | None:
    return json.dumps(data, indent=1) + "\n" if form == "json" else None
