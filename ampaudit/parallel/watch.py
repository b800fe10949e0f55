"""Watches the other ranks: whether they live, make progress, and audit the same."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import NoReturn

from ampaudit.core.errors import InputError, RankLost
from ampaudit.parallel.board import Board, rank_timeout
from ampaudit.parallel.identity import Identity

__all__ = ["Watch"]

_LOST_SECONDS = 60.0  # without a sign of life; code in C may hold the interpreter for a while
_LOOK_SECONDS = 0.5


@dataclass(slots=True)
class _Seen:
    """What a rank's counters were, and when they last changed."""

    counters: tuple[int, int] = (0, 0)
    alive: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)


class Watch:
    """Looks after the other ranks.

    Args:
        board: where they give signs of life.
        rank: of this process.
        count: of processes.
    """

    def __init__(self, board: Board, rank: int, count: int) -> None:
        self._board, self._rank = board, rank
        self._others = [other for other in range(count) if other != rank]
        self._hung = rank_timeout()
        self._lost = min(_LOST_SECONDS, self._hung)
        self._seen: dict[int, _Seen] = {}
        self._identity: Identity | None = None
        self._alike: set[int] = set()
        self._looked = 0.0

    def describe(self, identity: Identity) -> None:
        """Say what this rank audits, so that it is compared before anything has run."""
        self._identity = identity
        self._board.put(f"about/{self._rank}", json.dumps(asdict(identity)).encode())

    def is_due(self) -> bool:
        """Return whether it is time to look again, which is twice a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        return True

    def start_again(self) -> None:
        """Give all ranks their time again, after something that they have waited for."""
        self._seen.clear()

    def progress(self) -> list[int]:
        """Return how often each rank has moved, as far as it is known."""
        return [seen.counters[1] for _, seen in sorted(self._seen.items())]

    def check(self, rank: int) -> None:
        """Look after a rank that is at work.

        Raises:
            RankLost: it has ended or failed, gives no sign of life, or makes no progress.
            InputError: it audits something else.
        """
        if failure := self._failure(rank):
            raise RankLost(f"rank {rank}: {failure}", hint="run it alone, with --debug, to see more")
        self.compare(rank)
        seen, now = self._seen.setdefault(rank, _Seen()), time.monotonic()
        counters = self._board.counters(rank)
        if counters[0] != seen.counters[0]:
            seen.alive = now
        if counters[1] != seen.counters[1]:
            seen.moved = now
        seen.counters = counters
        if self._board.has(f"signal/{rank}"):
            _lose(rank, "was terminated")
        if self._board.is_gone(rank):
            _lose(rank, "has ended")
        if not seen.counters[0]:
            if now - seen.alive > self._hung:
                _lose(rank, f"has not started within {self._hung:.0f} s")
        elif now - seen.alive > self._lost:
            _lose(rank, f"has given no sign of life for {self._lost:.0f} s")
        if now - seen.moved > self._hung and rank > 0:  # the first has more to do than batches
            _lose(rank, f"has finished no batch for {self._hung:.0f} s")

    def why_terminated(self) -> str:
        """Return which rank's end made the launcher send this one a signal; empty if there is none.

        The others were sent it as well, but they say so before they end.
        """
        for rank in self._others:
            if failure := self._failure(rank):
                return f"as rank {rank} has failed: {failure}"
            ended = self._board.is_gone(rank)
            if ended and not (self._board.has(f"signal/{rank}") or self._board.has(f"left/{rank}")):
                return f"as rank {rank} has ended"
        absent = [str(rank) for rank in self._others if not self._board.has(f"process/{rank}")]
        if absent:
            return f"before {'rank' if len(absent) == 1 else 'ranks'} {', '.join(absent)} had started"
        return ""

    def _failure(self, rank: int) -> str:
        key = f"failed/{rank}"
        return self._board.get(key).decode(errors="replace") if self._board.has(key) else ""

    def compare(self, rank: int) -> None:
        """Compare on rank 0 what a rank has said that it audits; another version may say it in another form.

        Raises:
            InputError: it is something else.
        """
        if (
            self._rank > 0
            or rank in self._alike
            or self._identity is None
            or not self._board.has(f"about/{rank}")
        ):
            return
        told = json.loads(self._board.get(f"about/{rank}"))
        mine = asdict(self._identity)
        other = {name: told[name] for name in mine if isinstance(told.get(name), type(mine[name]))}
        if what := self._identity.difference(Identity(**mine | other)):
            raise InputError(
                f"the ranks do not audit the same: rank {rank} has {what}",
                hint="give all the same files, versions and options, and seed random weights and inputs",
            )
        self._alike.add(rank)


def _lose(rank: int, what: str) -> NoReturn:
    raise RankLost(
        f"rank {rank} {what}: nothing was reported",
        hint="see that rank's log; a process that runs out of memory is killed without a word",
    )
