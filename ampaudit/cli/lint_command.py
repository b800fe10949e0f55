"""``ampaudit lint``: training scripts in, mistakes out. Nothing in them is run, and torch is not needed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.cli.common_options import debug_option, output_option
from ampaudit.cli.output import deliver_document
from ampaudit.core.pyproject import LEVELS

if TYPE_CHECKING:
    from ampaudit.lint.linting import LintedFile, RuleSelection
    from ampaudit.report.lint import LintReport

__all__ = ["lint_command"]

_STDIN = "-"


@click.command("lint", short_help="Find mistakes in training scripts by reading them.")
@click.argument("paths", nargs=-1)
@click.option("--select", multiple=True, metavar="CODES", help="Only these codes, or what begins so; repeat.")
@click.option("--ignore", multiple=True, metavar="CODES", help="Not these codes; repeat.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out files or directories; repeat.")
@click.option("--fix", is_flag=True, help="Repair in place what can be repaired safely.")
@click.option("--diff", is_flag=True, help="Show what --fix would change, and change nothing.")
@click.option(
    "--fail-on",
    type=click.Choice(LEVELS),
    help="Severity from which the exit code is 1.  [default: warning]",
)
@click.option(
    "--stdin-filename",
    default="stdin.py",
    metavar="NAME",
    help="What '-' is called; .ipynb or .md say its kind.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A pyproject.toml.  [default: the nearest]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif", "github", "junit", "markdown"]),
    help="[default: what the suffix of --output says; else text]",
)
@output_option
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("-q", "--quiet", is_flag=True, help="Only the verdict.")
@click.option("-v", "--verbose", is_flag=True, help="What is suppressed, too.")
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
    from ampaudit.lint.config import read_lint_config
    from ampaudit.lint.linting import RuleSelection

    if options["output"] is not None:
        check_writable(options["output"], force=options["force"])
    if options["fix"] and options["diff"]:
        raise click.UsageError("--fix changes files, --diff shows what it would change: give one of them")
    path = options["config"] or find_config(Path.cwd())
    configured = read_lint_config(path) if path is not None else {}
    selection = RuleSelection.of(
        options["select"] or configured.get("select", ()), options["ignore"] or configured.get("ignore", ())
    )
    exclude = [*options["exclude"], *configured.get("exclude", ())]
    linted = list(_linted(paths or (".",), selection, exclude, options))
    fail_on = options["fail_on"] or configured.get("fail_on", "warning")
    report = _report(linted, fail_on, repaired=options["fix"])
    if options["diff"]:
        context.exit(_show_differences(linted, report))
    if options["fix"] and _STDIN in paths:
        click.echo(linted[0].after.encode(linted[0].encoding), nl=False)
        context.exit(report.exit_code)
    if options["fix"]:
        _write(linted)
    deliver_document(report, options)
    context.exit(report.exit_code)


def _linted(
    paths: tuple[str, ...], selection: RuleSelection, exclude: list[str], options: dict[str, Any]
) -> Iterable[LintedFile]:
    from ampaudit.lint.linting import lint_bytes, lint_files

    change = options["fix"] or options["diff"]
    if _STDIN in paths:
        if len(paths) > 1:
            raise click.UsageError("'-' stands alone: lint files in a second call")
        return [lint_bytes(sys.stdin.buffer.read(), options["stdin_filename"], selection, fix=change)]
    return lint_files(paths, selection, exclude=exclude, fix=change)


def _report(linted: list[LintedFile], fail_on: Any, *, repaired: bool) -> LintReport:
    from ampaudit.core.version import __version__
    from ampaudit.report.lint import LintReport

    return LintReport(
        schema=1,
        tool_version=__version__,
        fail_on=fail_on,
        linted=len(linted),
        findings=tuple(finding for file in linted for finding in file.findings),
        unread=tuple(item for file in linted for item in file.unread),
        fixed=sum(file.fixed for file in linted) if repaired else 0,
    )


def _show_differences(linted: list[LintedFile], report: LintReport) -> int:
    from ampaudit.core.text import escape_control
    from ampaudit.lint.source_text import diff_lines

    changed = [file for file in linted if file.after != file.before]
    for file in changed:
        for line in diff_lines(file.path, file.before, file.after):
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
