"""The ``ampaudit`` program: commands, and how every error ends as one clear line with an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from ampaudit.cli.bench_command import bench_command
from ampaudit.cli.check_command import check_command
from ampaudit.cli.convert_command import convert_command, verify_command
from ampaudit.cli.devices_command import devices_command
from ampaudit.cli.explain_command import explain_command
from ampaudit.cli.lint_command import lint_command
from ampaudit.cli.plan_command import plan_command
from ampaudit.cli.report_command import diff_command, report_command
from ampaudit.cli.rules_command import rules_group
from ampaudit.cli.scan_command import scan_command
from ampaudit.cli.terminal import make_printable
from ampaudit.cli.train_command import train_command
from ampaudit.core.errors import AuditError
from ampaudit.core.version import __version__

__all__ = ["main", "run"]

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ampaudit")
def main() -> None:
    """Find the layers of a PyTorch model that break in 16 bits, before you deploy it.

    Exit codes: 0 clean, 1 findings, 2 bad usage or input, 3 the audit could not be carried out.
    """


COMMANDS: tuple[click.Command, ...] = (
    *(scan_command, plan_command, train_command, convert_command, verify_command, check_command),
    *(
        lint_command,
        bench_command,
        report_command,
        diff_command,
        rules_group,
        devices_command,
        explain_command,
    ),
)
for _command in COMMANDS:
    main.add_command(_command)


def run() -> NoReturn:
    """Entry point of the console script."""
    debug = "--debug" in sys.argv
    make_printable()
    try:
        code = main.main(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _end("interrupted; nothing was written", INTERRUPTED)
    except AuditError as error:
        if debug:
            traceback.print_exc()
        _end(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if debug:
            traceback.print_exc()
        _end(
            f"cannot write the report: {error.strerror or error}\n  next: free some space, or use -o FILE", 2
        )
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        _end(f"internal error: {text}\n  next: please report it with the output of --debug", 3)
    sys.exit(code if isinstance(code, int) else 0)


def _end(message: str, code: int) -> NoReturn:
    from ampaudit.core.text import escape_control

    click.echo("\n".join(escape_control(line) for line in f"ampaudit: {message}".splitlines()), err=True)
    # a full stdout would otherwise complain a second time when Python closes it
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.exit(code)
