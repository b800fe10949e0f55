"""Divides the segments of a model among ranks: each runs its own for all batches, and hands them on."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import TypeAdapter

from ampaudit.core.config import Progress
from ampaudit.parallel.board import Board
from ampaudit.parallel.ranks import RankShare
from ampaudit.run.record import RunRecord
from ampaudit.run.share import Again, Failure, PartRecords, Route

__all__ = ["PipelineShare"]


class PipelineShare(RankShare):
    """All batches pass all ranks; they end in the last one, and rank 0 makes the report.

    Args:
        board: where ranks tell each other something.
        rank: of this process.
        count: of processes.
    """

    def __init__(self, board: Board, rank: int, count: int) -> None:
        super().__init__(board, rank, count)
        self.route = _Stage(self)

    def mine(self, phase: str, number: int) -> bool:
        """Return that every batch passes this rank."""
        super().mine(phase, number)
        return True

    def progress_of(self, phase: str) -> str:
        """Return the phase alone: the others are at other segments."""
        return phase

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        """Join the records of all ranks; if a batch has failed here, nobody waits for it any longer."""
        if own.failure is not None:
            failure = TypeAdapter(Failure).dump_json(own.failure)
            self._board.put(f"stopped/{self._passes}/{self.rank}", failure)
        return super().joined(phase, own, progress)

    def hand_on(self, key: str, data: bytes) -> None:
        """Leave something for another rank."""
        self._board.put(key, data)
        self.moved()

    def moved(self) -> None:
        """Say that this rank makes progress."""
        self._board.moved(self.rank)

    def taken(self, key: str, rank: int, *, keep: bool = False) -> bytes:
        """Wait for something that a rank leaves, and remove it.

        Raises:
            RankLost: that rank has failed, or is lost.
            AuditError: a batch has failed in another rank, which will hand on no more.
        """
        self._awaited(key, rank, self._raise_if_stopped)
        self.moved()
        return self._board.get(key) if keep else self._board.take(key)

    def _raise_if_stopped(self) -> None:
        for rank in range(self.count):
            key = f"stopped/{self._passes}/{rank}"
            if rank != self.rank and self._board.has(key):
                raise TypeAdapter(Failure).validate_json(self._board.get(key)).as_error()


class _Stage(Route):
    """The segments of one rank."""

    keeps = True

    def __init__(self, share: PipelineShare) -> None:
        self._share = share
        self._own = range(0)

    @property
    def ends(self) -> bool:
        """Whether batches end in this rank: it is the last."""
        return self._share.rank == self._share.count - 1

    def stages(self) -> int:
        """Return the number of ranks."""
        return self._share.count

    def local_segments(self, count: int) -> range:
        """Return the segments of this rank, of so many."""
        self._own = self._of(self._share.rank, count)
        self._count = count
        return self._own

    def passed(self, call: str) -> int:
        """Return how many segments a call has passed in earlier ranks."""
        del call
        return self._own.start

    def load(self, call: str) -> bytes:
        """Wait for the state that an earlier rank hands on."""
        start = self._own.start
        owner = next(rank for rank in range(self._share.count) if start - 1 in self._of(rank, self._count))
        return self._share.taken(f"state/{call}/{start}", owner)

    def save(self, call: str, passed: int, count: int, pack: Callable[[], bytes]) -> None:
        """Hand a state on to the next rank after the last segment of this one."""
        if passed == self._own.stop and passed < count:
            self._share.hand_on(f"state/{call}/{passed}", pack())
        else:
            self._share.moved()

    def agreed(self, phase: str, again: Again | None) -> Again:
        """Take from the last rank which batches have to run again."""
        key, table = f"again/{phase}", TypeAdapter(dict[int, dict[int, frozenset[str]]])
        if self.ends:
            found: Again = again or {}
            self._share.hand_on(key, table.dump_json({n: dict(masks) for n, masks in found.items()}))
            return found
        return table.validate_json(self._share.taken(key, self._share.count - 1, keep=True))

    def _of(self, rank: int, count: int) -> range:
        ranks = self._share.count
        return range(count * rank // ranks, count * (rank + 1) // ranks)
