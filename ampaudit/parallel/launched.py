"""Runs a command's work on the ranks that ``torchrun`` has launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from ampaudit.core.errors import AuditError, RankLost, first_line
from ampaudit.core.torchrun import place_of
from ampaudit.parallel.board import Board
from ampaudit.parallel.ranks import RankShare
from ampaudit.run.share import PartDone

__all__ = ["with_ranks"]


@contextmanager
def with_ranks(kind: type[RankShare] = RankShare, name: str = "") -> Iterator[RankShare | None]:
    """Yield this process's share of a command, ``None`` without ranks; all exit with the code of rank 0.

    Args:
        kind: Type of the share.
        name: Name of the work, for processes started by those of the ranks.
    """
    place = place_of()
    if place is None:
        yield None
        return
    share = kind(Board.connect(place.rank, name), place.rank, place.count)
    share.tell_signals()
    if place.rank > 0:
        try:
            yield share
        except (PartDone, RankLost):
            pass  # rank 0 detects lost ranks itself
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            share.fail(_summary(error))
        raise click.exceptions.Exit(share.exit_code())
    try:
        yield share
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        share.end(getattr(error, "exit_code", 3))
        raise
    share.end(0)


def _summary(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, AuditError) and error.args:
        return str(error.args[0])
    return f"{type(error).__name__}: {first_line(error)}"
