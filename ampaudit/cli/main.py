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
    # with the default of 700, garbage collection takes a sixth of the time to import torch
    gc.set_threshold(5_000)
    try:
        _open_missing_streams()
        if (place := torchrun.rank_and_world_size()) is not None and place[0] > 0:
            torchrun.silence()  # including the message after a signal
        if sys.argv[1:2] != ["record"]:  # a recorded script prints to its usual standard output
            _keep_output()
        interrupts.install()

        from ampaudit.cli.program import run_command

        interrupts.leave(run_command())
    except KeyboardInterrupt:
        interrupts.leave(interrupts.INTERRUPTED)


def _open_missing_streams() -> None:
    """Open the null device in place of a closed standard stream, so that no other file gets its number.

    Reading from such an input, or writing to such an output, still fails; errors are discarded.
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
