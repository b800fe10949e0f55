"""Starts the ``ampaudit`` program, which handles signals before it imports anything else."""

from __future__ import annotations

import gc
import os
import sys

from ampaudit.core import interrupts, torchrun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def run() -> NoReturn:
    """Run the console script."""
    # with the usual 700, a sixth of the time to import torch is spent looking for garbage among its objects
    gc.set_threshold(5_000)
    try:
        _open_missing_streams()
        if (place := torchrun.place_of()) is not None and place[0] > 0:
            torchrun.silence()  # also of what a signal says
        if sys.argv[1:2] != ["record"]:  # a script that is recorded prints as it does by itself
            _keep_output()
        interrupts.install()

        from ampaudit.cli.program import run_command

        interrupts.leave(run_command())
    except KeyboardInterrupt:
        interrupts.leave(interrupts.INTERRUPTED)


def _open_missing_streams() -> None:
    """Put the null device where a standard stream is closed, or the next file would take its place.

    Using such a stream fails as before: input cannot be read, and output cannot be written.
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _keep_output() -> None:
    """Keep standard output for reports: what native code and other processes print goes to stderr."""
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, closefd=False)
    os.dup2(2, 1)
