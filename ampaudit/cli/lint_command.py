"""``ampaudit lint``: training scripts in, mistakes out. Nothing in them is run, and torch is not needed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.cli.options import (
    FILE,
    config_from,
    config_options,
    debug_option,
    force_option,
    given,
    output_option,
    quiet_option,
    report_format_option,
    verbose_option,
)
from ampaudit.cli.output import deliver_document
from ampaudit.lint.config import LintConfig, read_lint_config

if TYPE_CHECKING:
    from ampaudit.lint.linting import LintedFile
    from ampaudit.report.lint import LintReport

__all__ = ["lint_command"]

_STDIN = "-"


@click.command("lint")
@click.argument("paths", nargs=-1)
@config_options(LintConfig)
@click.option("--fix", is_flag=True, help="Repair in place what can be repaired safely.")
@click.option("--diff", is_flag=True, help="Show what --fix would change, and change nothing.")
@click.option(
    "--stdin-filename",
    default="stdin.py",
    metavar="NAME",
    help="File name assumed for standard input; its suffix selects the parser.",
)
@click.option("--config", type=FILE, metavar="FILE", help="A pyproject.toml.  [default: the nearest]")
@report_format_option("text", "json", "sarif", "github", "junit", "markdown")
@output_option
@force_option
@quiet_option
@verbose_option("Suppressed findings as well.")
@debug_option
@click.pass_context
def lint_command(context: click.Context, /, paths: tuple[str, ...], **options: Any) -> None:
    """Find mistakes in mixed-precision training loops, in scripts, notebooks, Markdown, directories or globs.

    '-' reads a script from stdin; without PATHS the current directory is meant. Scripts are read as text and
    never run. Options come from the command line, then from [tool.ampaudit.lint] in pyproject.toml.
    Exit codes: 0 clean, 1 findings (with --diff: changes), 2 bad usage, or a file that cannot be read.
    """
    from ampaudit.core.files import check_writable
    from ampaudit.core.pyproject import find_config
    from ampaudit.lint.lint import lint_report

    if options["output"] is not None:
        check_writable(options["output"], force=options["force"])
    if options["fix"] and options["diff"]:
        raise click.UsageError("--fix changes files, --diff shows what it would change: give one of them")
    path = options["config"] or find_config(Path.cwd())
    configured = read_lint_config(path) if path is not None else {}
    exclude = [*options["exclude"], *configured.get("exclude", ())]
    config = config_from(LintConfig, configured | given(options), exclude=exclude)
    linted = list(_linted(paths or (".",), config, options))
    fixed = sum(file.fixed for file in linted) if options["fix"] else 0
    report = lint_report(linted, config.fail_on, fixed=fixed)
    if options["diff"]:
        context.exit(_show_differences(linted, report))
    if options["fix"] and _STDIN in paths:
        click.echo(linted[0].after.encode(linted[0].encoding), nl=False)
        context.exit(report.exit_code)
    if options["fix"]:
        _write(linted)
    deliver_document(report, options)
    context.exit(report.exit_code)


def _linted(paths: tuple[str, ...], config: LintConfig, options: dict[str, Any]) -> Iterable[LintedFile]:
    from ampaudit.lint.linting import Choice, lint_bytes, lint_files

    change, choice = options["fix"] or options["diff"], Choice.of(config.select, config.ignore)
    if _STDIN in paths:
        if len(paths) > 1:
            raise click.UsageError("'-' stands alone: lint files in a second call")
        return [lint_bytes(sys.stdin.buffer.read(), options["stdin_filename"], choice, fix=change)]
    return lint_files(paths, choice, exclude=config.exclude, fix=change)


def _show_differences(linted: list[LintedFile], report: LintReport) -> int:
    from ampaudit.core.text import escape_control
    from ampaudit.lint.patch import unified

    changed = [file for file in linted if file.after != file.before]
    for file in changed:
        for line in unified(file.path, file.before, file.after):
            click.echo(escape_control(line) if line[:2] in ("--", "++", "@@") else line)
    count = sum(file.fixed for file in linted)
    files = f"{len(changed)} file{'s' if len(changed) != 1 else ''}"
    click.echo(f"would repair {count} in {files}" if changed else "nothing to repair", err=True)
    for item in report.unread:
        click.echo(str(item), err=True)
    return 1 if changed else 2 if report.unread else 0


def _write(linted: list[LintedFile]) -> None:
    from ampaudit.core.files import replace_bytes

    for file in linted:
        if file.after != file.before:
            replace_bytes(Path(file.path), file.after.encode(file.encoding))
