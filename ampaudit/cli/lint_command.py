"""``ampaudit lint``: finds mixed-precision mistakes in training scripts without running them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.cli.options import (
    FirstRankCommand,
    config_from,
    config_options,
    configuration_option,
    explicit_options,
    report_options,
)
from ampaudit.cli.output import deliver_document
from ampaudit.cli.progress import ProgressBar
from ampaudit.cli.terminal import print_notes
from ampaudit.core.errors import InputError
from ampaudit.core.text import escape_control
from ampaudit.linter.config import LintConfig, read_lint_config
from ampaudit.render.render import keeping

if TYPE_CHECKING:
    from ampaudit.linter.linting import LintedFile
    from ampaudit.report.lint import LintReport

_STDIN = "-"


@click.command("lint", cls=FirstRankCommand)
@click.argument("paths", nargs=-1)
@config_options(LintConfig)
@click.option("--fix", is_flag=True, help="Apply safe fixes in place.")
@click.option("--diff", is_flag=True, help="Show the changes of --fix without making them.")
@click.option(
    "--stdin-filename",
    default="stdin.py",
    metavar="NAME",
    help="File name assumed for standard input; its suffix selects the parser.",
)
@configuration_option
@report_options("lint", "Also print suppressed findings.")
@click.pass_context
def lint_command(context: click.Context, /, paths: tuple[str, ...], **options: Any) -> None:
    """Find mistakes in mixed-precision training loops of scripts, notebooks and Markdown files.

    PATHS are files, directories or globs (default: the current directory); '-' reads standard input. No
    script is executed. Options on the command line override [tool.ampaudit.lint] in pyproject.toml.
    Exit codes: 0 no findings, 1 findings (with --diff: changes), 2 usage error, or no file could be read.
    """
    from ampaudit.core.pyproject import find_config
    from ampaudit.linter.lint import lint_report

    if options["fix"] and options["diff"]:
        raise click.UsageError("--fix and --diff cannot be combined")
    prints_code = options["diff"] or (options["fix"] and _STDIN in paths)
    if prints_code and "form" in explicit_options(options) and options["output"] is None:
        raise click.UsageError("--format has no effect where code or a diff is printed; add -o FILE")
    path = options["config"] or find_config()
    configured = read_lint_config(path) if path is not None else {}
    exclude = [*options["exclude"], *configured.get("exclude", ())]
    config = config_from(LintConfig, configured | explicit_options(options), exclude=exclude)
    linted = _lint(paths or (".",), config, options)
    fixed = sum(file.fixed for file in linted) if options["fix"] else 0
    for file in linted:
        if file.is_elsewhere and file.findings:
            print_notes(f"{file.path}: not fixed: it is a link to a file outside of the given paths")
    report = lint_report(linted, config, fixed=fixed)
    code = report.exit_code
    with keeping(report):
        if options["diff"]:
            code = _print_diff(linted, report)
        elif prints_code:
            click.echo(linted[0].after.encode(linted[0].encoding), nl=False)
        elif options["fix"]:
            _write(linted)
    if options["output"] is not None or not prints_code:
        deliver_document(report, options)
    context.exit(code)


def _lint(paths: tuple[str, ...], config: LintConfig, options: dict[str, Any]) -> list[LintedFile]:
    from ampaudit.linter.linting import available_cores, lint_bytes, lint_files
    from ampaudit.linter.selection import RuleSelection

    change = options["fix"] or options["diff"]
    if _STDIN in paths:
        if len(paths) > 1:
            raise click.UsageError("'-' cannot be combined with other paths")
        name = options["stdin_filename"]
        return [lint_bytes(_read_stdin(), name, RuleSelection.of(config), fix=change)]
    with ProgressBar(" ".join(paths)) as progress:
        jobs = available_cores()
        return list(lint_files(paths, config, fix=change, jobs=jobs, on_progress=progress.update))


def _read_stdin() -> bytes:
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        hint = "give it a script, or name a file"
        raise InputError(f"cannot read standard input: {error.strerror}", hint=hint) from error


def _print_diff(linted: list[LintedFile], report: LintReport) -> int:
    from ampaudit.linter.source_text import diff_lines

    changed, on_terminal = [file for file in linted if file.after != file.before], sys.stdout.isatty()
    for file in changed:
        for line in diff_lines(file.path, file.before, file.after):
            # a patch needs the exact code, in which a terminal would obey control characters
            safe = on_terminal or line[:2] in ("--", "++", "@@")
            click.echo(escape_control(line) if safe else line, color=True)
    count = sum(file.fixed for file in linted)
    files = f"{len(changed)} file{'s' if len(changed) != 1 else ''}"
    findings = f"{count} finding{'s' if count != 1 else ''}"
    print_notes(f"would fix {findings} in {files}" if changed else "nothing to fix")
    for item in report.unread:
        print_notes(str(item))
    return 1 if changed else report.exit_code if report.exit_code == 2 else 0


def _write(linted: list[LintedFile]) -> None:
    from ampaudit.core.files import replace_bytes

    for file in linted:
        if file.after != file.before:
            replace_bytes(Path(file.path), file.after.encode(file.encoding))
