"""``ampaudit rules``: lists, shows, validates and compares policies; only ``--model`` needs torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ampaudit.audit.config import PlanConfig
from ampaudit.cli.loading import load_source
from ampaudit.cli.options import config_from, config_options, debug_option, format_option, verbose_option
from ampaudit.cli.output import print_result
from ampaudit.cli.progress import ProgressBar
from ampaudit.cli.terminal import print_notes
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import escape_control, plural
from ampaudit.policy import OpFacts, RuleSet, load_file, load_policy, policy_names
from ampaudit.policy.load import LoadedPolicy
from ampaudit.policy.schema import Rule, WeightPolicy, When, aten_names, rules_schema_text
from ampaudit.render.grid import open_table

_OPS_SHOWN = 16


@click.group("rules")
def rules_group() -> None:
    """Work with cast policies: YAML files that say which ops run in 16 bits, and why."""


@rules_group.command("list")
@format_option()
@debug_option
def list_command(form: str, debug: bool) -> None:
    """List the shipped policies."""
    rows = list_rows()
    print_result(render_list(rows), _json(rows, form))


@rules_group.command("show")
@click.argument("policy")
@format_option()
@debug_option
def show_command(policy: str, form: str, debug: bool) -> None:
    """Show the rules of POLICY in order, including inherited ones.

    POLICY is a shipped policy or a rule file.
    """
    loaded = load_file(policy)
    data = loaded.file.model_dump(mode="json", exclude_defaults=True, by_alias=True)
    print_result(render_policy(loaded), _json(data, form))


@rules_group.command("validate")
@click.argument("file")
@debug_option
def validate_command(file: str, debug: bool) -> None:
    """Validate a rule file: exit code 0 if it is usable; warnings go to stderr."""
    loaded = load_file(file)
    for warning in loaded.warnings:
        print_notes(f"warning: {warning}")
    rules = plural(len(loaded.file.rules), "rule")
    ops = plural(len(loaded.rules.op_names), "op")
    click.echo(f"{loaded.path}: policy {loaded.file.name!r}, {rules} about {ops}: valid")


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
    a, b = load_policy(first), load_policy(second)
    if model is None:
        rows = diff_rows(a, b, low_precision_format(options["dtype"]).name)
        print_result(render_diff(a, b, rows, verbose=options["verbose"]), _json(rows, form))
        return
    with ProgressBar(model) as progress:
        config = config_from(PlanConfig, options)
        config.check()
        source = load_source(model, config_from(SourceConfig, options))

        from ampaudit.audit.plan import plan

        session = Session(progress.update)
        plans = [plan(source, config=config, session=session, policy=policy) for policy in (a, b)]
    from ampaudit.render.json import to_json
    from ampaudit.render.terminal import printable
    from ampaudit.views.plan import plans_compared

    data = {p.policy: json.loads(to_json(p)) for p in plans}
    content = printable(plans_compared(plans[0], plans[1], verbose=options["verbose"]))
    print_result(content, _json(data, form))


@rules_group.command("schema")
@debug_option
def schema_command(debug: bool) -> None:
    """Print the JSON Schema of rule files, for completion in editors."""
    click.echo(rules_schema_text(), nl=False)


def _json(data: Any, form: str) -> str | None:
    return json.dumps(data, indent=1) + "\n" if form == "json" else None


def list_rows() -> list[dict[str, Any]]:
    """Return name, title and size of each shipped policy."""
    return [
        {
            "name": name,
            "title": rules.file.title,
            "level": rules.file.level,
            "rules": len(rules.file.rules),
            "ops": len(rules.op_names),
            "measured": rules.measured,
        }
        for name, rules in ((name, load_policy(name)) for name in policy_names())
    ]


def render_list(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """Render a table of the shipped policies."""
    table = open_table("policy", "rules", "ops", "acts on", "title", left=("acts on", "title"))
    for row in rows:
        acts = "calls" if row["level"] == "calls" else "FP32 graph"
        measured = ", numbers" if row["measured"] else ""
        table.add_row(
            row["name"], str(row["rules"]), str(row["ops"]), f"{acts}{measured}", Text(row["title"])
        )
    return table


def render_policy(loaded: LoadedPolicy) -> RenderableType:
    """Render title, weights, and every rule with its matches and reason."""
    file = loaded.file
    parts: list[RenderableType] = [
        Text.assemble((file.name, "bold"), f"  {escape_control(file.title)}"),
        Text(_headline(loaded), "dim"),
    ]
    for number, rule in enumerate(file.rules, 1):
        parts += [Text(), _rule(number, rule, loaded)]
    default = f"otherwise  {file.defaults.cast}: {file.defaults.why}"
    return Group(*parts, Text(), Text(default))


def _headline(loaded: LoadedPolicy) -> str:
    file = loaded.file
    extends = f"extends {', '.join(file.extends)}; " if file.extends else ""
    where = "while the model's code runs" if file.level == "calls" else "on the model's FP32 graph"
    scale = file.loss_scale if isinstance(file.loss_scale, str) else file.loss_scale.kind
    return f"{extends}acts {where}; {_weights(file.weights)}; loss scale {scale}"


def _weights(weights: WeightPolicy) -> str:
    stored = "weights stored in FP32" if weights.storage == "float32" else "weights stored in 16 bits"
    master = ", FP32 masters kept" if weights.master and weights.storage == "lower" else ""
    casts = [
        f"{k} {v}" for k, v in (("inputs", weights.inputs), ("outputs", weights.outputs)) if v != "unchanged"
    ]
    exceptions = f", {len(weights.keep)} exceptions" if weights.keep else ""
    return ", ".join([stored + master + exceptions, *casts])


def _rule(number: int, rule: Rule, loaded: LoadedPolicy) -> RenderableType:
    head = Text.assemble(
        f"{number:>3}  ",
        (escape_control(rule.id), "bold"),
        f"  {rule.cast}",
        (f"  {rule.reason.value}", "dim"),
    )
    body: list[RenderableType] = [Text(line) for line in _conditions(rule, loaded)]
    body += [
        Text.assemble(("why     ", "dim"), escape_control(rule.why)),
        Text(f"source  {escape_control(rule.source)}", "dim"),
    ]
    return Group(head, Padding(Group(*body), (0, 0, 0, 5), expand=False))


def _conditions(rule: Rule, loaded: LoadedPolicy) -> list[str]:
    lines = []
    if rule.match.op:
        ops = ", ".join(rule.match.op)
        count = len(loaded.ops.get(rule.id, ()))
        lines.append(
            f"ops     {escape_control(ops)}"
            + (f"  ({count} of ATen's)" if count != len(rule.match.op) else "")
        )
    rest = rule.match.model_dump(exclude_defaults=True, exclude={"op"})
    lines += [f"{key:<7} {escape_control(_words(value))}" for key, value in rest.items()]
    when = rule.when.model_dump(exclude_defaults=True, by_alias=True) if rule.when != When() else {}
    lines += [f"when    {key} {escape_control(_words(value))}" for key, value in when.items()]
    if rule.arguments:
        lines.append(f"but     {_words(rule.arguments)}")
    if rule.clamp is not None:
        lines.append(f"then    clamp the output to {rule.clamp}")
    return lines


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def diff_rows(first: RuleSet, second: RuleSet, dtype: str) -> list[dict[str, str]]:
    """Return the ATen ops that two policies treat differently, ignoring layers and numbers."""
    rows = []
    for op in sorted((first.op_names | second.op_names) & aten_names()):
        a, b = (rules.decide(OpFacts(op, "", dtype)) for rules in (first, second))
        if a.cast is not b.cast:
            ours, theirs = (f"{d.cast} ({d.reason})" for d in (a, b))
            rows.append({"op": op, "first": ours, "second": theirs})
    return rows


def render_diff(
    first: RuleSet, second: RuleSet, rows: Sequence[dict[str, str]], *, verbose: bool = False
) -> RenderableType:
    """Render the ops that differ, grouped by treatment, and other settings."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row["first"], row["second"]), []).append(row["op"])
    total = len(first.op_names | second.op_names)
    differ = f"differ in {len(rows)} of the {total} ops that they name" if total else "name no ops"
    parts: list[RenderableType] = [
        Text.assemble(("diff  ", "bold"), f"{first.name} and {second.name} {differ}")
    ]
    if groups:
        table = open_table(first.name, second.name, "ops", left=(second.name, "ops"))
        for (ours, theirs), ops in sorted(
            groups.items(), key=lambda item: (_is_mild(*item[0]), -len(item[1]))
        ):
            table.add_row(ours, theirs, Text(_op_list(ops, verbose)))
        parts += [Text(), table]
    other = open_table("", first.name, second.name, left=(first.name, second.name))
    a, b = first.file, second.file
    for label, ours, theirs in (
        ("any other op", a.defaults.cast.value, b.defaults.cast.value),
        ("weights", _weights(a.weights), _weights(b.weights)),
        ("acts on", a.level, b.level),
    ):
        other.add_row(label, Text(ours), Text(theirs))
    return Group(*parts, Text(), other)


def _is_mild(ours: str, theirs: str) -> bool:
    """Return whether the precision depends on the inputs on both sides."""
    return all(side.split(" ")[0] in ("follow", "narrowest", "widest") for side in (ours, theirs))


def _op_list(ops: Sequence[str], verbose: bool) -> str:
    """List base names without overloads and in-place variants, truncated unless verbose."""
    bases = list(dict.fromkeys(op.partition(".")[0].removesuffix("_") for op in ops))
    first = bases if verbose else bases[:_OPS_SHOWN]
    more = f" and {len(bases) - len(first)} more (-v)" if len(first) < len(bases) else ""
    return escape_control(", ".join(first)) + more
