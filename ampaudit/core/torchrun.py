"""Finds the rank of this process under ``torchrun``."""

from __future__ import annotations

import os


def rank_and_world_size() -> tuple[int, int] | None:
    """Return the rank of this process, from 0, and the number of processes; ``None`` if it is the only one.

    Launchers other than ``torchrun`` set the same variables.
    """
    rank, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    launched = all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (launched and rank.isdecimal() and count.isdecimal() and int(count) > 1):
        return None
    return int(rank), int(count)


def silence() -> None:
    """Discard all further output, including writes to the file descriptors."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
