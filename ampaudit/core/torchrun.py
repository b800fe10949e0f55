"""Finds the rank of this process under ``torchrun``."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # imported before signals are handled
    from collections.abc import Mapping

__all__ = ["place_of", "silence"]


def place_of(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the rank of this process, from 0, and the number of processes; ``None`` if it is the only one.

    Launchers other than ``torchrun`` set the same variables.
    """
    rank, count = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    launched = all(name in environment for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (launched and rank.isdecimal() and count.isdecimal() and int(count) > 1):
        return None
    return int(rank), int(count)


def silence() -> None:
    """Discard all further output, including writes to the file descriptors."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
