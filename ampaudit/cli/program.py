"""Defines the ``ampaudit`` program: its commands, error messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from ampaudit.cli.terminal import bound_size, make_printable, print_notes
from ampaudit.core import __version__
from ampaudit.core.errors import AuditError, did_you_mean, first_line, text_of
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.interrupts import INTERRUPTED

Names: TypeAlias = Callable[[], Iterator[tuple[str, str]]]
# module and function of each command, and its line in the help text
COMMANDS = {
    "init": ("init_command:init_command", "Write a model file for a project."),
    "scan": ("scan_command:scan_command", "Find the layers that overflow."),
    "merge": ("merge_command:merge_command", "Merge the parts of a scan into one report."),
    "plan": ("plan_command:plan_command", "Show what a policy does to each op."),
    "train": ("train_command:train_command", "Train in FP32 and 16 bits side by side."),
    "tune": ("tune_command:tune_command", "Find the fewest ops that must stay in float32."),
    "convert": ("convert_command:convert_command", "Write a converted checkpoint."),
    "record": ("record_command:record_command", "Record a script's calls of a module as inputs."),
    "verify": ("convert_command:verify_command", "Verify a converted directory."),
    "check": ("check_command:check_command", "Check models against budgets."),
    "lint": ("lint_command:lint_command", "Find mixed-precision mistakes in training scripts."),
    "bench": ("bench_command:bench_command", "Compare time, memory and accuracy of each mode."),
    "report": ("report_command:report_command", "Show a saved report in any format."),
    "diff": ("report_command:diff_command", "Compare two reports."),
    "rules": ("rules_command:rules_group", "List, show, check and compare policies."),
    "devices": ("devices_command:devices_command", "Show what devices support in 16 bits."),
    "explain": ("explain_command:explain_command", "Explain a check, such as AMP106."),
}


class Program(click.Group):
    """A command group that imports a command when it is called, so that ``ampaudit --help`` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            if near := did_you_mean(cmd_name, COMMANDS):
                ctx.fail(f"No such command '{cmd_name}': {near.strip()}")
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"ampaudit.cli.{module}"), name)
        return add_completion(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ampaudit")
def main() -> None:
    """Find the layers of a PyTorch model that break in 16 bits, before you deploy it.

    Exit codes: 0 clean, 1 findings, 2 bad usage or input, 3 the audit could not be carried out.
    """


def run_command() -> int:
    """Run the command that the arguments name, and return its exit code."""
    bound_size()
    make_printable()
    try:
        code = main.main(standalone_mode=False)
        sys.stdout.flush()
    except click.Abort as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            return INTERRUPTED
        print_notes("ampaudit: standard input ended before a question was answered")
        return 2
    except click.ClickException as error:
        error.show()
        print_notes(*getattr(error, "__notes__", ()))
        return error.exit_code
    except BrokenPipeError:
        return 1  # the reader of the pipe has closed it
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        message, exit_code = _describe_error(error)
        print_notes(*f"ampaudit: {message}".splitlines(), *getattr(error, "__notes__", ()))
        return exit_code
    return code if isinstance(code, int) else 0


def _describe_error(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code of an error."""
    if isinstance(error, AuditError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        from ampaudit.core.untrusted import describe

        reason = error.strerror or first_line(error)
        where = f"{describe(error.filename)}: " if error.filename else ""
        return f"{where}{reason}\n  next: check that file, or run again with --debug", 2
    text = f"{type(error).__name__}: {text_of(error)}".splitlines()[0]
    return f"internal error: {text}\n  next: please report it with the output of --debug", 3


class CompletionType(StringParamType):
    """A parameter type that completes names, also in comma-separated lists, and with ``files`` paths."""

    def __init__(self, names: Names | None = None, *, files: bool = False) -> None:
        self.names, self.files = names, files

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with the last part of the input; else let the shell list files."""
        before, comma, last = incomplete.rpartition(",")
        names = self.names() if self.names is not None else ()
        items = [
            CompletionItem(f"{before}{comma}{name}", help=text or None)
            for name, text in names
            if name.lower().startswith(last.lower())
        ]
        if self.files and (not items or os.sep in incomplete):
            return [CompletionItem(incomplete, type="file")]
        return items


def add_completion(command: click.Command) -> click.Command:
    """Add completion to the parameters of a command according to their names, and return it."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            add_completion(inner)
    for parameter in command.params:
        completed = _BY_NAME.get(f"{command.name} {parameter.name}") or _BY_NAME.get(parameter.name or "")
        if completed is not None and isinstance(parameter.type, StringParamType):
            parameter.type = completed
    return command


def _policies() -> Iterator[tuple[str, str]]:
    from ampaudit.policy.load import policy_names

    return ((name, "") for name in policy_names())


def _codes(prefix: str = "") -> Names:
    def names() -> Iterator[tuple[str, str]]:
        from ampaudit.findings.pages.page import code_titles

        return ((code, title) for code, title in code_titles() if code.startswith(prefix))

    return names


def _devices() -> Iterator[tuple[str, str]]:
    from ampaudit.devices.catalogue import all_devices

    return ((name, device.name) for name, device in all_devices().items())


def _without_help(*names: str) -> CompletionType:
    return CompletionType(lambda: ((name, "") for name in names))


_POLICY, _FILES, _ALL_CODES = (
    CompletionType(_policies, files=True),
    CompletionType(files=True),
    CompletionType(_codes()),
)
_LINT_CODES, _DEVICE = CompletionType(_codes("AMP8")), CompletionType(_devices)
# by the name of a parameter, or of a command and its parameter
_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("policy", "policies", "diff first", "diff second"), _POLICY),
    **dict.fromkeys(("model", "targets", "paths", "validate file"), _FILES),
    **dict.fromkeys(("code", "allow", "ignore"), _ALL_CODES),
    **dict.fromkeys(("lint select", "lint ignore"), _LINT_CODES),
    **dict.fromkeys(("target", "devices name"), _DEVICE),
    "dtype": _without_help(*LOW_PRECISION_NAMES),
    "device": _without_help("auto", "cpu", "cuda", "cuda:0", "mps", "xpu"),
}
