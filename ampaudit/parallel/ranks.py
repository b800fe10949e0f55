"""Shares batches among the ranks that ``torchrun`` starts: each sends what it recorded to rank 0."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import NoReturn

from pydantic import ConfigDict, TypeAdapter

from ampaudit.core import interrupts
from ampaudit.core.config import Progress
from ampaudit.core.errors import AuditError, InputError, RankLost
from ampaudit.parallel.board import Board, rank_timeout
from ampaudit.parallel.identity import Identity
from ampaudit.parallel.wire import (
    KIND,
    SCHEMA,
    AuditPart,
    part_from_json,
    part_to_json,
    records_of_rank,
    records_to_json,
)
from ampaudit.run.record import RunRecord
from ampaudit.run.share import (
    BatchNumbers,
    Failure,
    PartDone,
    PartRecords,
    Share,
    joined_in_order,
    raise_first,
)

__all__ = ["RankShare"]

_LOST_SECONDS = 60.0  # without a sign of life; code in C may hold the interpreter for a while
_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.05
_NAMED = 8  # ranks whose progress is shown one by one
_AT_ONCE = 64  # batches whose records may lie on the board
_PARTING_SECONDS = 5.0  # for the others to read the exit code
_SAYING_SECONDS = 2.0  # for a rank that is terminated to say so


@dataclass(frozen=True, slots=True)
class _Answer:
    """What rank 0 tells all ranks: what measured rules need of all batches, the error, or what is run next.

    One that holds nothing asks for the records of further batches.
    """

    totals: list[RunRecord] = field(default_factory=list)
    failure: Failure | None = None
    task: list[str] = field(default_factory=list)


@cache
def _schema() -> TypeAdapter[_Answer]:
    return TypeAdapter(_Answer)


@cache
def _numbers() -> TypeAdapter[BatchNumbers]:
    return TypeAdapter(BatchNumbers, config=ConfigDict(ser_json_inf_nan="constants"))


class RankShare(Share):
    """Runs every n-th batch, and joins the records of all ranks on rank 0.

    Args:
        board: where ranks tell each other something.
        rank: of this process.
        count: of processes.
    """

    def __init__(self, board: Board, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._board = board
        self._watch = Watch(board, rank, count)
        self._about: tuple[str, Identity] | None = None
        self.follows = rank > 0
        self._passes = self._answers = self._gathers = 0
        self._moves_before = 0  # of each rank, in earlier passes

    def describe(self, location: str, identity: Identity) -> None:
        """Say what this rank audits."""
        self._about = location, identity
        self._watch.describe(identity)

    def mine(self, phase: str, number: int) -> bool:
        """Return whether this rank runs a batch.

        Raises:
            RankLost: another rank is lost, or has failed.
            InputError: another rank audits something else.
            PartDone: rank 0 has ended.
        """
        del phase
        self._board.moved(self.rank)
        if self._watch.is_due():
            self._look_after_others(self._passes + 1)
        return number % self.count == self.rank

    def progress_of(self, phase: str) -> str:
        """Add the batch at which each of the others is; of many, of the first and of the last."""
        at = [max(moves - self._moves_before, 0) for moves in self._watch.progress()]
        if not at:
            return phase
        words = f"{min(at)} to {max(at)}" if len(at) > _NAMED else ", ".join(map(str, at))
        return f"{phase}, other ranks at {words}"

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        """Return the record of all batches under each policy.

        Raises:
            AuditError: the first batch that could not be audited.
            RankLost: a rank is lost, or has failed.
            InputError: a rank audits something else.
        """
        self._passes += 1
        assert self._about is not None, "ranks say what they audit before they join"
        batches = tuple(sorted(own.records))
        failure = _naming(self.rank, own.failure)
        part = AuditPart(KIND, SCHEMA, self.rank, self.count, *self._about, batches, failure)
        if self.rank > 0:
            self._board.put(f"{self._passes}/{self.rank}", part_to_json(part))
            return self._sent(own)
        parts, total = [part], self._about[1].batches
        for rank in range(1, self.count):
            told = self._awaited(
                f"{self._passes}/{rank}", rank, lambda: progress(self.progress_of(phase), total - 1, total)
            )
            parts.append(part_from_json(told, f"rank {rank}"))
        self._moves_before += total
        try:
            raise_first(part.failure for part in parts)
            totals = joined_in_order(self._received(parts, own))
        except AuditError as error:
            self._tell(_Answer(failure=Failure.of(0, error)))
            raise
        self._tell(_Answer([total.measured() for total in totals]))
        return totals

    def _received(self, parts: Sequence[AuditPart], own: PartRecords) -> Iterator[list[RunRecord]]:
        """Ask for the records of all batches, some at a time, and return them in the order of the batches."""
        owners = sorted((number, part.index) for part in parts for number in part.batches)
        end = 0
        for number, rank in owners:
            if number >= end:
                end += _AT_ONCE
                self._tell(_Answer())
            if rank == 0:
                yield own.records.pop(number)
            else:
                key = f"{self._passes}/records/{number}"
                self._awaited(key, rank)
                yield records_of_rank(self._board.take(key), f"rank {rank}")

    def _sent(self, own: PartRecords) -> list[RunRecord]:
        """Put the records of this rank's batches on the board as rank 0 asks for them; return its totals."""
        end = 0
        while not (answer := self._told()).totals:
            end += _AT_ONCE
            for number in sorted(number for number in own.records if number < end):
                self._board.put(f"{self._passes}/records/{number}", records_to_json(own.records.pop(number)))
        return answer.totals

    def gathered(self, own: BatchNumbers) -> BatchNumbers:
        """Return the numbers of all batches, in their order, on rank 0.

        Raises:
            RankLost: a rank is lost, or has failed.
            PartDone: this is not rank 0.
        """
        self._gathers += 1
        key, numbers = f"gathered/{self._gathers}", _numbers()
        if self.rank > 0:
            self._board.put(f"{key}/{self.rank}", numbers.dump_json(own))
            raise PartDone
        found = dict(own)
        for rank in range(1, self.count):
            self._awaited(f"{key}/{rank}", rank)
            found |= numbers.validate_json(self._board.take(f"{key}/{rank}"))
        return dict(sorted(found.items()))

    def tell(self, *task: str) -> None:
        """Tell the other ranks what is run next."""
        if self.rank == 0:
            self._tell(_Answer(task=list(task)))

    def tasks(self) -> Iterator[list[str]]:
        """Yield what rank 0 tells.

        Raises:
            PartDone: rank 0 has ended.
        """
        while True:
            yield self._told().task

    def finish(self) -> None:
        """End the work of all ranks but the first.

        Raises:
            PartDone: this is such a rank.
        """
        if self.rank > 0:
            raise PartDone

    def fail(self, why: str) -> None:
        """Tell rank 0 why this rank cannot go on."""
        self._board.put(f"failed/{self.rank}", why.encode(errors="replace"))

    def end(self, code: int) -> None:
        """Tell all ranks the exit code, and wait until they have it."""
        self._board.put("exit", str(code).encode())
        deadline = time.monotonic() + _PARTING_SECONDS
        for rank in range(1, self.count):
            while not self._board.has(f"left/{rank}") and time.monotonic() < deadline:
                if self._board.is_gone(rank):
                    break
                time.sleep(_POLL_SECONDS)

    def exit_code(self) -> int:
        """Return rank 0's exit code, once it has one."""
        code = int(self._awaited("exit", 0))
        self._board.put(f"left/{self.rank}", b"")
        return code

    def tell_signals(self) -> None:
        """Say on a signal which rank's end is the reason; other ranks tell that they had one."""
        if self.rank == 0:
            interrupts.explained_by(self._watch.why_terminated)
        else:
            interrupts.at_end(self._tell_signal)

    def _tell_signal(self) -> None:
        telling = threading.Thread(target=self._board.put, args=(f"signal/{self.rank}", b""), daemon=True)
        telling.start()
        telling.join(_SAYING_SECONDS)  # the store may be gone

    def _tell(self, answer: _Answer) -> None:
        """Tell all ranks how rank 0 goes on; from now on they have their time again."""
        self._watch.start_again()
        self._answers += 1
        self._board.put(f"answer/{self._answers}", _schema().dump_json(answer, exclude_defaults=True))

    def _told(self) -> _Answer:
        self._answers += 1
        answer = _schema().validate_json(self._awaited(f"answer/{self._answers}", 0))
        if answer.failure is not None:
            raise answer.failure.as_error()
        return answer

    def _awaited(self, key: str, rank: int, show: Callable[[], None] = lambda: None) -> bytes:
        """Return what a rank has put there, as soon as it has, and show meanwhile how far all are.

        Raises:
            RankLost: a rank has failed, or it is lost, or makes no progress.
            InputError: it audits something else.
            PartDone: rank 0 has ended.
        """
        while not self._board.has(key):
            if self._watch.is_due():
                self._look_after_others(self._passes, rank)
                show()
            time.sleep(_POLL_SECONDS)
        if rank > 0:
            self._watch.compare(rank)
        return self._board.get(key)

    def _look_after_others(self, number: int, awaited: int = 0) -> None:
        """Look after the ranks that work on a pass, which are all on rank 0, and one that is waited for."""
        ranks = {awaited}
        if self.rank == 0:
            ranks |= {rank for rank in range(1, self.count) if not self._board.has(f"{number}/{rank}")}
        elif self._board.has("exit"):
            raise PartDone
        for rank in sorted({0, *ranks} - {self.rank}):
            self._watch.check(rank)


def _naming(rank: int, failure: Failure | None) -> Failure | None:
    """Name the rank in an error that may be its machine's, such as a lack of memory."""
    if failure is None or failure.kind != "RunFailed":
        return failure
    return replace(failure, message=f"rank {rank}: {failure.message}")


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
