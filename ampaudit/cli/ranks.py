"""Runs a command on the ranks that ``torchrun`` has started."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import click

from ampaudit.core.torchrun import place_of

if TYPE_CHECKING:
    from ampaudit.parallel.ranks import RankShare

__all__ = ["among_ranks"]


def among_ranks(*, pipeline: bool = False) -> AbstractContextManager[RankShare | None]:
    """Enter the process group of torchrun, if any; all ranks end with the exit code of the first.

    Args:
        pipeline: Whether to divide the model instead of the batches.
    """
    if place_of() is None:
        if pipeline and "RANK" not in os.environ:
            raise click.UsageError("--pipeline divides the model among ranks: start it with torchrun")
        return nullcontext()
    from ampaudit.parallel.ranks import PipelineShare, RankShare, with_ranks

    return with_ranks(PipelineShare if pipeline else RankShare)
