"""``ampaudit check``: targets and budgets in, one table and an exit code out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ampaudit.cli.common_options import debug_option, ignore_option, report_format_option
from ampaudit.cli.output import deliver_document
from ampaudit.core.pyproject import LEVELS

__all__ = ["check_command"]

_FILE = click.Path(path_type=Path)
_OPTIONS = ("device", "dtype", "policy", "batches", "seed", "weights", "inputs", "train", "ignore")
_BUDGETS = ("fail_on", "allow", "min_headroom", "min_sqnr", "max_metric_drop", "max_fp32_share")
_DEFAULTS: dict[str, Any] = {"fail_on": "error", "jobs": 1}


@click.command("check", short_help="The pre-deployment gate.")
@click.argument("targets", nargs=-1)
@click.option("--policy", help="Policy name or rule file.  [default: ampaudit; converted directories: as-is]")
@click.option("--dtype", help="float16 or bfloat16.  [default: float16]")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), help="[default: auto]")
@click.option(
    "--fail-on",
    type=click.Choice(LEVELS),
    help="Severity from which a finding counts.  [default: error]",
)
@click.option("--allow", multiple=True, metavar="CODE", help="Findings that do not count; repeat.")
@ignore_option
@click.option("--min-headroom", type=float, metavar="BITS", help="Least headroom of every 16-bit site.")
@click.option("--min-sqnr", type=float, metavar="DB", help="Least accuracy of every output.")
@click.option(
    "--max-metric-drop",
    type=float,
    metavar="X",
    help="Largest fall of the model file's metric(output, batch).",
)
@click.option(
    "--max-fp32-share", type=click.FloatRange(0, 1), metavar="P", help="Largest share of sites in float32."
)
@click.option(
    "--baseline", type=_FILE, metavar="FILE", help="An earlier report: only what is new or worse counts."
)
@click.option("--weights", type=_FILE, metavar="FILE", help="Checkpoint: safetensors, or .pt state_dict.")
@click.option(
    "--inputs", type=_FILE, metavar="FILE", help="Python file with example_inputs(), batches() or metric()."
)
@click.option("--batches", type=click.IntRange(1), help="Batches to run.  [default: 1]")
@click.option("--seed", type=int, help="[default: 0]")
@click.option("--train", is_flag=True, default=None, help="Use the models in training mode.")
@click.option("-j", "--jobs", type=click.IntRange(1), help="Targets at a time.  [default: 1]")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Stop a target that takes longer.",
)
@click.option("--max-memory", metavar="SIZE", help="Stop a target that takes more, such as 4GB.")
@click.option("--config", type=_FILE, metavar="FILE", help="A pyproject.toml.  [default: the nearest]")
@report_format_option
@click.option("-o", "--output", type=_FILE, metavar="FILE", help="Write the result to FILE.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@debug_option
@click.pass_context
def check_command(context: click.Context, /, targets: tuple[str, ...], **options: Any) -> None:
    """Hold TARGETS against budgets: model files, converted directories, .pt2 programs.

    Each runs in a process of its own. Options come from the command line, then from [tool.ampaudit] in
    pyproject.toml. Exit codes: 0 all pass, 1 a budget is exceeded, 2 bad input, 3 not audited.
    """
    from ampaudit.ci.config import parse_size, read_config
    from ampaudit.ci.judge import check_codes
    from ampaudit.core.files import check_writable
    from ampaudit.core.pyproject import find_config
    from ampaudit.report.budgets import Budgets

    if options["output"] is not None:
        check_writable(options["output"], force=options["force"])
    path = options["config"] or find_config(Path.cwd())
    configured = read_config(path) if path is not None else {}
    chosen = {**_DEFAULTS, **configured, **_given(context, options)}
    wanted = targets or tuple(configured.get("targets", ()))
    if not wanted:
        raise click.UsageError("no target: name one, or write targets = [...] under [tool.ampaudit]")
    check_codes(tuple(chosen.get("allow", ())))
    Budgets.of(chosen)  # refuses what is no limit
    memory = parse_size(chosen["max_memory"]) if chosen.get("max_memory") else None
    results = _checked(wanted, chosen, memory)

    from ampaudit.report.check import CheckResults

    found = CheckResults.of(results)
    deliver_document(found, options)
    context.exit(found.exit_code)


def _given(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """What stands on the command line; the rest may be in the configuration."""
    given = (n for n in options if context.get_parameter_source(n) is ParameterSource.COMMANDLINE)
    return {name: options[name] for name in given}


def _checked(targets: tuple[str, ...], chosen: dict[str, Any], memory: int | None) -> Any:
    from ampaudit.ci.pool import Limits, check_all
    from ampaudit.cli.progress import ProgressBar
    from ampaudit.report.check import Request

    options = {name: _plain(chosen[name]) for name in _OPTIONS if chosen.get(name) is not None}
    budgets = {name: _plain(chosen[name]) for name in _BUDGETS if chosen.get(name) is not None}
    options |= {name: budgets[name] for name in ("min_headroom", "min_sqnr") if name in budgets}
    baseline = str(chosen["baseline"]) if chosen.get("baseline") else None
    requests = [Request(target, options, budgets, baseline) for target in targets]
    limits = Limits(jobs=chosen["jobs"], timeout=chosen.get("timeout"), memory=memory)
    count = f"{len(targets)} targets" if len(targets) > 1 else targets[0]
    with ProgressBar(count) as progress:
        return check_all(requests, limits, progress.update)


def _plain(value: Any) -> Any:
    """A value that JSON can carry."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
