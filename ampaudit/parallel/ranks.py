"""Shares batches among the ranks that ``torchrun`` starts: each sends what it recorded to rank 0."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NoReturn

import click
from pydantic import TypeAdapter

from ampaudit.core.config import Progress
from ampaudit.core.errors import AuditError, InputError, RunFailed, first_line
from ampaudit.parallel.board import Board
from ampaudit.parallel.identity import Identity, first_mismatch
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
from ampaudit.run.share import Failure, PartDone, PartRecords, Share, joined_in_order, raise_first

__all__ = ["RankShare", "started_by_torchrun", "with_ranks"]

_POLL_SECONDS = 0.05
_AT_ONCE = 64  # batches whose records may lie on the board
_LOST_SECONDS = 20.0  # without a sign of life
_HUNG_SECONDS = 600.0  # without progress; a batch of a large model takes minutes


@dataclass(frozen=True, slots=True)
class _Answer:
    """What rank 0 tells all ranks: what measured rules need of all batches, or the error.

    One that holds nothing asks for the records of further batches.
    """

    totals: list[RunRecord] = field(default_factory=list)
    failure: Failure | None = None


@cache
def _schema() -> TypeAdapter[_Answer]:
    return TypeAdapter(_Answer)


@dataclass(slots=True)
class _Seen:
    """What a rank's counters were, and when they last changed."""

    counters: tuple[int, int] = (0, 0)
    alive: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)


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
        self._about: tuple[str, Identity] | None = None
        self._passes = self._answers = 0
        self._seen: dict[int, _Seen] = {}
        self._hung = float(os.environ.get("AMPAUDIT_RANK_TIMEOUT", _HUNG_SECONDS))

    def describe(self, location: str, identity: Identity) -> None:
        """Say what this rank audits."""
        self._about = location, identity

    def mine(self, phase: str, number: int) -> bool:
        """Return whether this rank runs a batch."""
        del phase
        self._board.moved(self.rank)
        return number % self.count == self.rank

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        """Return the record of all batches under each policy.

        Raises:
            AuditError: the first batch that could not be audited.
            RunFailed: a rank is lost, or has failed.
            InputError: a rank audits something else.
        """
        self._passes += 1
        assert self._about is not None, "ranks say what they audit before they join"
        batches = tuple(sorted(own.records))
        part = AuditPart(KIND, SCHEMA, self.rank, self.count, *self._about, batches, own.failure)
        if self.rank > 0:
            self._board.put(f"{self._passes}/{self.rank}", part_to_json(part))
            return self._sent(own)
        parts = [part]
        for rank in range(1, self.count):
            progress(f"{phase}: waiting for rank {rank}", rank, self.count)
            parts.append(part_from_json(self._awaited(f"{self._passes}/{rank}", rank), f"rank {rank}"))
        try:
            if what := first_mismatch((f"rank {part.index}", part.identity) for part in parts):
                raise InputError(
                    f"the ranks do not audit the same: {what}",
                    hint="give all the same files, versions and options, and seed random weights and inputs",
                )
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

    def finish(self) -> None:
        """End the work of all ranks but the first.

        Raises:
            PartDone: this is such a rank.
        """
        if self.rank > 0:
            raise PartDone

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this rank cannot go on."""
        text = str(error.args[0]) if isinstance(error, AuditError) and error.args else first_line(error)
        known = isinstance(error, AuditError)
        self._board.put(
            f"failed/{self.rank}", (text if known else f"{type(error).__name__}: {text}").encode()
        )

    def end(self, code: int) -> None:
        """Tell all ranks the exit code, and wait until they have it."""
        self._board.put("exit", str(code).encode())
        deadline = time.monotonic() + 5.0
        for rank in range(1, self.count):
            while not self._board.has(f"left/{rank}") and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def exit_code(self) -> int:
        """Return rank 0's exit code, once it has one."""
        code = int(self._awaited("exit", 0))
        self._board.put(f"left/{self.rank}", b"")
        return code

    def _tell(self, answer: _Answer) -> None:
        """Tell all ranks how rank 0 goes on; from now on they have their time again."""
        self._seen.clear()
        self._answers += 1
        self._board.put(f"answer/{self._answers}", _schema().dump_json(answer, exclude_defaults=True))

    def _told(self) -> _Answer:
        self._answers += 1
        answer = _schema().validate_json(self._awaited(f"answer/{self._answers}", 0))
        if answer.failure is not None:
            raise answer.failure.as_error()
        return answer

    def _awaited(self, key: str, rank: int) -> bytes:
        """Return what a rank has put there, as soon as it has.

        Raises:
            RunFailed: it has failed, or it is lost, or makes no progress.
        """
        while not self._board.has(key):
            failed = f"failed/{rank}"
            if rank > 0 and self._board.has(failed):
                text = self._board.get(failed).decode(errors="replace")
                raise RunFailed(f"rank {rank}: {text}", hint="run it alone, with --debug, to see more")
            self._look_after(rank)
            time.sleep(_POLL_SECONDS)
        return self._board.get(key)

    def _look_after(self, rank: int) -> None:
        seen, now = self._seen.setdefault(rank, _Seen()), time.monotonic()
        counters = self._board.counters(rank)
        if counters[0] != seen.counters[0]:
            seen.alive = now
        if counters[1] != seen.counters[1]:
            seen.moved = now
        seen.counters = counters
        if self._board.is_gone(rank):
            _lost(rank, "has ended")
        if now - seen.alive > _LOST_SECONDS:
            _lost(rank, f"has given no sign of life for {_LOST_SECONDS:.0f} s")
        if now - seen.moved > self._hung and rank > 0:
            _lost(rank, f"has finished no batch for {self._hung:.0f} s")


def _lost(rank: int, what: str) -> NoReturn:
    raise RunFailed(
        f"rank {rank} {what}: nothing was reported",
        hint="see that rank's log; a process that runs out of memory is killed without a word",
    )


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is one of several processes of ``torchrun``."""
    known = all(name in environment for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return known and int(environment.get("WORLD_SIZE", "1")) > 1


@contextmanager
def with_ranks(kind: type[RankShare] = RankShare) -> Iterator[RankShare | None]:
    """Give this process's share of a command; all ranks end with the exit code of the first.

    Processes of other ranks print nothing.

    Args:
        kind: how the work is divided.
    """
    if not started_by_torchrun():
        yield None
        return
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank > 0:
        _silence()
    share = kind(Board.connect(rank, f"{socket.gethostname()}:{os.getpid()}"), rank, count)
    if rank > 0:
        try:
            yield share
        except PartDone:
            pass
        except BaseException as error:
            share.fail(error)
        raise click.exceptions.Exit(share.exit_code())
    code = 3
    try:
        yield share
        code = 0
    except click.exceptions.Exit as error:
        code = error.exit_code
        raise
    except (AuditError, click.ClickException) as error:
        code = error.exit_code
        raise
    finally:
        share.end(code)


def _silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
