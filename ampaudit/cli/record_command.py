"""``ampaudit record``: writes the calls of a script's modules, as inputs of an audit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampaudit.cli.options import (
    FILE,
    FirstRankCommand,
    config_from,
    config_options,
    debug_option,
    file_option,
    force_option,
)
from ampaudit.cli.terminal import print_notes
from ampaudit.core import interrupts
from ampaudit.core.errors import InputError, SourceError, did_you_mean
from ampaudit.core.text import plural
from ampaudit.core.untrusted import describe, describe_path
from ampaudit.recording.config import RecordConfig

if TYPE_CHECKING:
    from ampaudit.recording.calls import Watcher

_SHOWN = 8  # called classes listed in an error


@click.command(
    "record",
    cls=FirstRankCommand,
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-m",
    "--module",
    "modules",
    multiple=True,
    required=True,
    metavar="NAME",
    help="Module to record (repeatable).",
)
@file_option("-o", "--output", required=True, metavar="DIR", help="Directory to write.")
@config_options(RecordConfig)
@force_option
@debug_option
@click.argument("script", type=FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def record_command(
    modules: tuple[str, ...], output: Path, script: Path, arguments: tuple[str, ...], **options: Any
) -> None:
    """Run SCRIPT with its ARGUMENTS as Python does, and record the calls of a module.

    \b
    The NAME of --module is one of
      pipe.unet          an attribute of a variable of the script or of a running function
      encoder.layer.0    a submodule of a module that the script calls
      BertEncoder        a class: its first instance that is called

    To audit a model on the recording: ampaudit scan MODEL --inputs DIR
    """  # noqa: D301  (click wants the character, not its escape)
    config = config_from(RecordConfig, options)
    if not script.is_file():
        raise SourceError(f"{describe_path(script)}: no such file", hint="give the path of the script")

    from ampaudit.recording.calls import record_named

    with ExitStack() as stack, record_named(modules, output, config) as watcher:
        stack.callback(_print_summary, watcher)  # at the end, even if the script fails
        failure = _run(script, arguments)
    if failure:
        raise SourceError(
            f"{describe_path(script)} ended with {failure}", hint="its calls until then are recorded"
        )
    _check_recorded(watcher)


def _print_summary(watcher: Watcher) -> None:
    for recording in watcher.recordings.values():
        if recording.calls:
            print_notes(f"ampaudit: {recording.summary}")


def _run(script: Path, arguments: tuple[str, ...]) -> str:
    """Run a script as ``__main__``, and return the exit code or message with which it failed, or nothing.

    Raises:
        SourceError: The script raises an exception.
    """
    import runpy

    from ampaudit.source.user_code import locating_failures

    try:
        with interrupts.Released(), _as_main(script, arguments), locating_failures(str(script)):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0):
            return f"exit code {ending.code}" if isinstance(ending.code, int) else describe(ending.code, 200)
    return ""


@contextmanager
def _as_main(script: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as Python does for a script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _check_recorded(watcher: Watcher) -> None:
    """Check that each module was called, and that a call of it could be recorded.

    Raises:
        InputError: A module was not called, or none of its calls could be recorded.
    """
    for name, recording in watcher.recordings.items():
        if not recording.calls:
            called = [
                f"{kind} ({plural(count, 'call')})" for kind, count in watcher.called.most_common(_SHOWN)
            ]
            hint = (
                f"the script calls {', '.join(called)}"
                if called
                else "the script calls no module; name one that runs the model"
            )
            if recording.module is None:
                what, hint = "no such module was called", did_you_mean(name, watcher.called) + hint
            else:
                what = f"{type(recording.module).__name__} was never called, except for its methods"
            raise InputError(f"--module {describe(name)}: {what}", hint=hint)
        if not recording.recorded:
            why = next(iter(recording.skipped), recording.stopped)
            raise InputError(f"--module {describe(name)}: no call could be recorded", hint=describe(why, 200))
