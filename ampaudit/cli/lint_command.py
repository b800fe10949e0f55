"""``ampaudit lint``: find mixed-precision mistakes in training scripts without running them."""

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


@click.command("lint", short_help="Find mixed-precision mistakes in training scripts.")
@click.argument("paths", nargs=-1)
@click.option("--select", multiple=True, metavar="CODES", help="Codes or prefixes to enable (repeatable).")
@click.option("--ignore", multiple=True, metavar="CODES", help="Codes or prefixes to disable (repeatable).")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Files or directories to skip (repeatable).")
@click.option("--fix", is_flag=True, help="Apply safe fixes in place.")
@click.option("--diff", is_flag=True, help="Show the changes of --fix without making them.")
@click.option(
    "--fail-on",
    type=click.Choice(LEVELS),
    help="Lowest severity that makes the exit code 1.  [default: warning]",
)
@click.option(
    "--stdin-filename",
    default="stdin.py",
    metavar="NAME",
    help="File name assumed for standard input; its suffix selects the parser.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration file.  [default: the nearest pyproject.toml]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif", "github", "junit", "markdown"]),
    help="Output format.  [default: by the suffix of --output, else text]",
)
@output_option
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option("-q", "--quiet", is_flag=True, help="Print the summary only.")
@click.option("-v", "--verbose", is_flag=True, help="Also print suppressed findings.")
@debug_option
@click.pass_context
def lint_command(context: click.Context, /, paths: tuple[str, ...], **options: Any) -> None:
    """Find mistakes in mixed-precision training loops of scripts, notebooks and Markdown files.

    PATHS are files, directories or globs (default: the current directory); '-' reads standard input. No
    script is executed. Options on the command line override [tool.ampaudit.lint] in pyproject.toml.
    Exit codes: 0 no findings, 1 findings (with --diff: changes), 2 usage error or unreadable file.
    """
    from ampaudit.core.files import check_writable
    from ampaudit.core.pyproject import find_config
    from ampaudit.lint.config import read_lint_config
    from ampaudit.lint.linting import RuleSelection

    if options["output"] is not None:
        check_writable(options["output"], force=options["force"])
    if options["fix"] and options["diff"]:
        raise click.UsageError("--fix and --diff cannot be combined")
    path = options["config"] or find_config(Path.cwd())
    configured = read_lint_config(path) if path is not None else {}
    selection = RuleSelection.parse(
        options["select"] or configured.get("select", ()), options["ignore"] or configured.get("ignore", ())
    )
    exclude = [*options["exclude"], *configured.get("exclude", ())]
    linted = list(_linted(paths or (".",), selection, exclude, options))
    fail_on = options["fail_on"] or configured.get("fail_on", "warning")
    report = _report(linted, fail_on, fixed=options["fix"])
    if options["diff"]:
        context.exit(_print_diff(linted, report))
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
            raise click.UsageError("'-' cannot be combined with other paths")
        return [lint_bytes(sys.stdin.buffer.read(), options["stdin_filename"], selection, fix=change)]
    return lint_files(paths, selection, exclude=exclude, fix=change)


def _report(linted: list[LintedFile], fail_on: Any, *, fixed: bool) -> LintReport:
    from ampaudit.core.version import __version__
    from ampaudit.report.lint import LintReport

    return LintReport(
        schema=1,
        tool_version=__version__,
        fail_on=fail_on,
        linted=len(linted),
        findings=tuple(finding for file in linted for finding in file.findings),
        unread=tuple(item for file in linted for item in file.unread),
        fixed=sum(file.fixed for file in linted) if fixed else 0,
    )


def _print_diff(linted: list[LintedFile], report: LintReport) -> int:
    from ampaudit.core.text import escape_control
    from ampaudit.lint.source_text import diff_lines

    changed = [file for file in linted if file.after != file.before]
    for file in changed:
        for line in diff_lines(file.path, file.before, file.after):
            click.echo(escape_control(line) if line[:2] in ("--", "++", "@@") else line)
    count = sum(file.fixed for file in linted)
    files = f"{len(changed)} file{'s' if len(changed) != 1 else ''}"
    findings = f"{count} finding{'s' if count != 1 else ''}"
    click.echo(f"would fix {findings} in {files}" if changed else "nothing to fix", err=True)
    for item in report.unread:
        click.echo(str(item), err=True)
    return 1 if changed else 2 if report.unread else 0


def _write(linted: list[LintedFile]) -> None:
    from ampaudit.core.files import replace_bytes

    for file in linted:
        if file.after != file.before:
            replace_bytes(Path(file.path), file.after.encode(file.encoding))
