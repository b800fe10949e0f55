"""Divides the segments of a model among ranks: each runs all batches through its own segments."""

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
    """Passes all batches through all ranks; the last computes the outputs and rank 0 makes the report."""

    def __init__(self, board: Board, rank: int, count: int) -> None:
        super().__init__(board, rank, count)
        self.route = _Stage(self)

    def mine(self, phase: str, number: int) -> bool:
        """Return True: every batch passes through this rank."""
        super().mine(phase, number)
        return True

    def progress_of(self, phase: str) -> str:
        """Return the phase without the progress of other ranks, which are at other segments."""
        return phase

    def joined(self, phase: str, local: PartRecords, progress: Progress) -> list[RunRecord]:
        """Join the records of all ranks; a failure here is announced, so that no rank waits for the batch."""
        if local.failure is not None:
            failure = TypeAdapter(Failure).dump_json(local.failure)
            self._board.put(f"stopped/{self._passes}/{self.rank}", failure)
        return super().joined(phase, local, progress)

    def send(self, key: str, data: bytes) -> None:
        """Send data to another rank."""
        self._board.put(key, data)
        self.moved()

    def moved(self) -> None:
        """Report progress of this rank."""
        self._board.moved(self.rank)

    def receive(self, key: str, rank: int, *, keep: bool = False) -> bytes:
        """Wait for data from a rank, and remove it from the board unless ``keep``.

        Raises:
            RankLost: That rank has failed or is lost.
            AuditError: A batch has failed in another rank.
        """
        self._wait_for(key, rank, self._raise_if_stopped)
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
        self._segments = range(0)

    @property
    def ends(self) -> bool:
        """Whether this is the last rank, where batches end."""
        return self._share.rank == self._share.count - 1

    def stages(self) -> int:
        """Return the number of ranks."""
        return self._share.count

    def local_segments(self, count: int) -> range:
        """Return the segments of this rank, given their total number."""
        self._segments = self._segments_of(self._share.rank, count)
        self._count = count
        return self._segments

    def passed(self, call: str) -> int:
        """Return the number of segments that earlier ranks run."""
        del call
        return self._segments.start

    def load(self, call: str) -> bytes:
        """Wait for the state from the previous rank."""
        start = self._segments.start
        owner = next(
            rank for rank in range(self._share.count) if start - 1 in self._segments_of(rank, self._count)
        )
        return self._share.receive(f"state/{call}/{start}", owner)

    def save(self, call: str, passed: int, count: int, pack: Callable[[], bytes]) -> None:
        """Send the state to the next rank after the last segment of this one."""
        if passed == self._segments.stop and passed < count:
            self._share.send(f"state/{call}/{passed}", pack())
        else:
            self._share.moved()

    def agreed(self, phase: str, again: Again | None) -> Again:
        """Return the batches that have to run again, as decided by the last rank."""
        key, table = f"again/{phase}", TypeAdapter(dict[int, dict[int, frozenset[str]]])
        if self.ends:
            batches: Again = again or {}
            self._share.send(key, table.dump_json({n: dict(masks) for n, masks in batches.items()}))
            return batches
        return table.validate_json(self._share.receive(key, self._share.count - 1, keep=True))

    def _segments_of(self, rank: int, count: int) -> range:
        ranks = self._share.count
        return range(count * rank // ranks, count * (rank + 1) // ranks)
