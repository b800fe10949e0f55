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
    """Give this process's share of a command; all ranks end with the exit code of the first.

    Args:
        kind: how the work is divided.
        name: of the work, if the processes of the ranks have started others for it.
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
            pass  # rank 0 finds out itself who is lost
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            share.fail(_told_in_a_line(error))
        raise click.exceptions.Exit(share.exit_code())
    try:
        yield share
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        share.end(getattr(error, "exit_code", 3))
        raise
    share.end(0)


def _told_in_a_line(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, AuditError) and error.args:
        return str(error.args[0])
    return f"{type(error).__name__}: {first_line(error)}"
