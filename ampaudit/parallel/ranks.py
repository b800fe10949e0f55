"""Divides batches among the ranks of ``torchrun``; each sends its records to rank 0.

They communicate through the store of ``torchrun`` alone. A gloo process group would need resolvable names and
open ports between all ranks, could not be polled while a rank waits, and reports a lost rank only as a closed
connection.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import click
import psutil
from pydantic import ConfigDict, TypeAdapter
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ampaudit.core import interrupts
from ampaudit.core.errors import AuditError, InputError, RankLost, RunFailed, UsageError, first_line
from ampaudit.core.session import Progress
from ampaudit.core.torchrun import rank_and_world_size
from ampaudit.core.untrusted import describe
from ampaudit.parallel.identity import CommandShare, Identity
from ampaudit.parallel.parts import (
    KIND,
    PART_SCHEMA,
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
    RepairMasks,
    joined_in_order,
    raise_first,
)

_BEAT_SECONDS = 1.0
_ANSWER_SECONDS = 120.0  # for a connection, and for a reply
_START_SECONDS = 30.0  # minimum, for the import of torch
_LIMIT = "AMPAUDIT_RANK_TIMEOUT"
_HUNG_SECONDS = 600.0  # without progress; a batch of a large model takes minutes
_CHUNK = 1 << 22  # bytes of a key's value; the store refuses more than 8 MiB
_LOST_SECONDS = 60.0  # without a heartbeat; C code may hold the interpreter for a while
_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.05
_MAX_SHOWN = 8  # maximum number of ranks to show one by one
_AT_ONCE = 64  # batches whose records may be on the board at the same time
_EXIT_SECONDS = 5.0  # for the other ranks to read the exit code
_SIGNAL_SECONDS = 2.0  # for a terminated rank to report the signal


@dataclass(frozen=True, slots=True)
class _Answer:
    """A message from rank 0 to all ranks; an empty one asks for the records of further batches."""

    # joined records, reduced to what measured rules need
    totals: list[RunRecord] = field(default_factory=list)
    failure: Failure | None = None  # error that ends the audit
    task: list[str] = field(default_factory=list)  # command to run next


_ANSWER = TypeAdapter(_Answer)
_FAILURE = TypeAdapter(Failure)
_NUMBERS = TypeAdapter(BatchNumbers, config=ConfigDict(ser_json_inf_nan="constants"))


class RankShare(CommandShare):
    """Runs every n-th batch, and joins the records of all ranks on rank 0."""

    def __init__(self, board: Board, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._board = board
        self._monitor = RankMonitor(board, rank, count)
        self.follows = rank > 0
        self._passes = self._answers = self._gathers = 0
        self._batches_before = 0  # those of earlier passes

    def describe(self, location: str, identity: Identity) -> None:
        """Set what this rank audits."""
        super().describe(location, identity)
        self._monitor.describe(identity)

    def mine(self, phase: str, number: int) -> bool:
        """Return whether this rank runs a batch, after a check of the other ranks."""
        self._board.add(f"batches/{self.rank}")
        self.check_others()
        return number % self.count == self.rank

    def progress_of(self, phase: str) -> str:
        """Add the batch that each other rank has reached; a range for many ranks."""
        at = [max(batches - self._batches_before, 0) for batches in self._monitor.batches()]
        if not at:
            return phase
        words = f"{min(at)} to {max(at)}" if len(at) > _MAX_SHOWN else ", ".join(map(str, at))
        return f"{phase}, other ranks at {words}"

    def joined(self, phase: str, local: PartRecords, progress: Progress) -> list[RunRecord]:
        """Return the joined record of all batches for each policy; see ``Share``."""
        self._passes += 1
        assert self.about is not None, "describe() comes before joined()"
        batches = tuple(sorted(local.records))
        failure = local.failure
        if failure is not None and failure.kind == "RunFailed":  # perhaps its machine's, as a lack of memory
            failure = replace(failure, message=f"rank {self.rank}: {failure.message}")
        part = AuditPart(KIND, PART_SCHEMA, self.rank, self.count, *self.about, batches, failure)
        if self.rank > 0:
            self._board.put(f"{self._passes}/{self.rank}", part_to_json(part))
            return self._send(local)
        parts, total = [part], self.about[1].batches
        for rank in range(1, self.count):
            key = f"{self._passes}/{rank}"
            self._wait_for(key, rank, lambda: progress(self.progress_of(phase), total - 1, total))
            parts.append(part_from_json(self._board.get(key), f"rank {rank}"))
        self._batches_before += total
        try:
            raise_first(part.failure for part in parts)
            totals = joined_in_order(self._receive(parts, local))
        except AuditError as error:
            self._tell(_Answer(failure=Failure.of(0, error)))
            raise
        self._tell(_Answer([total.measured() for total in totals]))
        return totals

    def _receive(self, parts: Sequence[AuditPart], local: PartRecords) -> Iterator[list[RunRecord]]:
        """Request the records of all batches, a few at a time, and yield them in the order of the batches."""
        owners = sorted((number, part.index) for part in parts for number in part.batches)
        end = 0
        for number, rank in owners:
            if number >= end:
                end += _AT_ONCE
                self._tell(_Answer())
            if rank == 0:
                yield local.records.pop(number)
            else:
                key = f"{self._passes}/records/{number}"
                self._wait_for(key, rank)
                yield records_of_rank(self._board.take(key), f"rank {rank}")

    def _send(self, local: PartRecords) -> list[RunRecord]:
        """Send this rank's records as rank 0 requests them, and return the totals."""
        end = 0
        while not (answer := self._next_answer()).totals:
            end += _AT_ONCE
            for number in sorted(number for number in local.records if number < end):
                self._board.put(
                    f"{self._passes}/records/{number}", records_to_json(local.records.pop(number))
                )
        return answer.totals

    def gathered(self, local: BatchNumbers) -> BatchNumbers:
        """Return the numbers of all batches, in their order, on rank 0; end the other ranks."""
        self._gathers += 1
        key = f"gathered/{self._gathers}"
        if self.rank > 0:
            self._board.put(f"{key}/{self.rank}", _NUMBERS.dump_json(local))
            raise PartDone
        numbers = dict(local)
        for rank in range(1, self.count):
            self._wait_for(f"{key}/{rank}", rank)
            numbers |= _NUMBERS.validate_json(self._board.take(f"{key}/{rank}"))
        return dict(sorted(numbers.items()))

    def tell(self, *task: str) -> None:
        """Send the command to run next to the other ranks."""
        if self.rank == 0:
            self._tell(_Answer(task=list(task)))

    def tasks(self) -> Iterator[list[str]]:
        """Yield the commands from rank 0 until it ends."""
        while True:
            yield self._next_answer().task

    def finish(self) -> None:
        """End the work of all ranks but rank 0."""
        if self.rank > 0:
            raise PartDone

    def fail(self, why: str) -> None:
        """Report the failure of this rank to rank 0."""
        self._board.put(f"failed/{self.rank}", why.encode(errors="replace"))

    def end(self, code: int) -> None:
        """Send the exit code to all ranks, and wait until they have read it."""
        self._board.put("exit", str(code).encode())
        deadline = time.monotonic() + _EXIT_SECONDS
        for rank in range(1, self.count):
            while not self._board.has(f"left/{rank}") and time.monotonic() < deadline:
                if self._board.is_gone(rank):
                    break
                time.sleep(_POLL_SECONDS)

    def exit_code(self) -> int:
        """Wait for rank 0's exit code."""
        with suppress(PartDone):
            self._wait_for("exit", 0)
        code = int(self._board.get("exit"))
        self._board.put(f"left/{self.rank}", b"")
        return code

    def tell_signals(self) -> None:
        """On a signal, rank 0 explains which rank caused it; the others report that they received one."""
        if self.rank == 0:
            interrupts.explained_by(self._monitor.why_terminated)
        else:
            interrupts.at_end(self._tell_signal)

    def _tell_signal(self) -> None:
        thread = threading.Thread(target=self._board.put, args=(f"signal/{self.rank}", b""), daemon=True)
        thread.start()
        thread.join(_SIGNAL_SECONDS)  # the store may not answer

    def _tell(self, answer: _Answer) -> None:
        self._answers += 1
        self._board.put(f"answer/{self._answers}", _ANSWER.dump_json(answer, exclude_defaults=True))

    def _next_answer(self) -> _Answer:
        self._answers += 1
        self._wait_for(f"answer/{self._answers}", 0)
        answer = _ANSWER.validate_json(self._board.get(f"answer/{self._answers}"))
        if answer.failure is not None:
            raise answer.failure.as_error()
        return answer

    def _wait_for(self, key: str, rank: int, show: Callable[[], None] = lambda: None) -> None:
        """Wait for an entry from a rank, and call ``show`` meanwhile to display progress.

        Raises:
            RankLost: A rank has failed, is lost, or makes no progress.
            InputError: A rank audits another model, or with other inputs or options.
            PartDone: Rank 0 has ended.
        """
        while not self._board.has(key):
            if self._monitor.is_due():
                self._check(rank)
                show()
            time.sleep(_POLL_SECONDS)
        if rank > 0:
            self._monitor.compare(rank)

    def check_others(self) -> None:
        """Check other ranks, at most twice a second; see ``Share``."""
        if self._monitor.is_due():
            self._check()

    def _check(self, awaited: int = 0) -> None:
        """Count progress, and check rank 0 and the awaited rank; rank 0 checks all.

        So a rank that waits counts as one that makes progress.
        """
        self._board.add(f"moved/{self.rank}")
        if self.rank > 0 and self._board.has("exit"):
            raise PartDone
        for rank in sorted({0, awaited}) if self.rank > 0 else range(self.count):
            if rank != self.rank:
                self._monitor.check(rank)


class RankMonitor:
    """Detects ranks that have ended, failed or hung, or whose audit differs."""

    def __init__(self, board: Board, rank: int, count: int) -> None:
        self._board, self._rank = board, rank
        self._others = [other for other in range(count) if other != rank]
        self._hung = rank_timeout()
        self._lost = min(_LOST_SECONDS, self._hung)
        self._changes: dict[str, tuple[int, float]] = {}  # values of counters, and when they changed
        self._batches: dict[int, int] = {}
        self._identity: Identity | None = None
        self._alike: set[int] = set()
        self._last_check = 0.0

    def describe(self, identity: Identity) -> None:
        """Publish what this rank audits, for comparison before anything runs."""
        self._identity = identity
        self._board.put(f"about/{self._rank}", json.dumps(asdict(identity)).encode())

    def is_due(self) -> bool:
        """Return whether it is time for the next check; there are two a second."""
        now = time.monotonic()
        if now - self._last_check < _LOOK_SECONDS:
            return False
        self._last_check = now
        return True

    def batches(self) -> list[int]:
        """Return the number of batches that each rank checked so far has begun."""
        return [number for _, number in sorted(self._batches.items())]

    def check(self, rank: int) -> None:
        """Check a rank that is at work.

        Raises:
            RankLost: The rank has ended or failed, has no heartbeat, or makes no progress.
            InputError: The rank's audit differs.
        """
        if failure := self._failure(rank):
            raise RankLost(f"rank {rank}: {failure}", hint="run it alone, with --debug, to see more")
        self.compare(rank)
        self._batches[rank] = self._board.add(f"batches/{rank}", 0)
        if self._board.has(f"signal/{rank}"):
            _raise_lost(rank, "was terminated")
        if self._board.is_gone(rank):
            _raise_lost(rank, "has ended")
        beats, idle = self._idle(f"alive/{rank}")
        if not beats and idle > self._hung:
            _raise_lost(rank, f"has not started within {self._hung:.0f} s")
        if beats and idle > self._lost:
            _raise_lost(rank, f"has given no sign of life for {self._lost:.0f} s")
        if rank > 0 and self._idle(f"moved/{rank}")[1] > self._hung:  # rank 0 has other work besides batches
            _raise_lost(rank, f"has finished no batch for {self._hung:.0f} s")

    def _idle(self, counter: str) -> tuple[int, float]:
        """Return the value of a counter, and the seconds since this process saw it change."""
        value, now = self._board.add(counter, 0), time.monotonic()
        if counter not in self._changes or self._changes[counter][0] != value:
            self._changes[counter] = value, now
        return value, now - self._changes[counter][1]

    def why_terminated(self) -> str:
        """Describe which rank's end made the launcher terminate this one; empty if unknown.

        Ranks that were terminated as well have reported so before their end.
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
        """Raise an ``InputError`` if a rank's audit differs; fields that this version lacks are ignored."""
        if (
            self._rank > 0
            or rank in self._alike
            or self._identity is None
            or not self._board.has(f"about/{rank}")
        ):
            return
        fields = json.loads(self._board.get(f"about/{rank}"))
        mine = asdict(self._identity)
        other = {name: fields[name] for name in mine if isinstance(fields.get(name), type(mine[name]))}
        if what := self._identity.difference(Identity(**mine | other)):
            raise InputError(
                f"the ranks do not audit the same: rank {rank} has {what}",
                hint="give all the same files, versions and options, and seed random weights and inputs",
            )
        self._alike.add(rank)


def _raise_lost(rank: int, what: str) -> NoReturn:
    raise RankLost(
        f"rank {rank} {what}: nothing was reported",
        hint="see that rank's log; a process that runs out of memory is killed without a word",
    )


@contextmanager
def with_ranks(kind: type[RankShare] = RankShare, name: str = "") -> Iterator[RankShare]:
    """Yield this rank's share of a command; all ranks exit with the code of rank 0.

    ``name`` is empty in the processes that the launcher started, and identifies the work of their children.
    """
    place = rank_and_world_size()
    assert place is not None, "only a process of torchrun has a rank"
    rank, count = place
    share = kind(Board.connect(rank, name), rank, count)
    share.tell_signals()
    if rank > 0:
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


class PipelineShare(RankShare):
    """Passes all batches through all ranks; the last computes the outputs and rank 0 makes the report."""

    keeps_states = True

    def __init__(self, board: Board, rank: int, count: int) -> None:
        super().__init__(board, rank, count)
        self._segments = range(0)

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
            self._board.put(f"stopped/{self._passes}/{self.rank}", _FAILURE.dump_json(local.failure))
        return super().joined(phase, local, progress)

    @property
    def ends_batches(self) -> bool:
        """Whether this is the last rank, where batches end."""
        return self.rank == self.count - 1

    def stages(self) -> int:
        """Return the number of ranks."""
        return self.count

    def local_segments(self, count: int) -> range:
        """Return the segments of this rank, given their total number."""
        self._segments = self._segments_of(self.rank, count)
        self._total = count
        return self._segments

    def segments_passed(self, call: str) -> int:
        """Return the number of segments that earlier ranks run."""
        return self._segments.start

    def load_state(self, call: str) -> bytes:
        """Wait for the state from the previous rank, and remove it from the board."""
        start, ranks = self._segments.start, range(self.count)
        owner = next(rank for rank in ranks if start - 1 in self._segments_of(rank, self._total))
        self._wait_for(f"state/{call}/{start}", owner, self._raise_if_stopped)
        return self._board.take(f"state/{call}/{start}")

    def save_state(self, call: str, passed: int, count: int, pack: Callable[[], bytes]) -> None:
        """Send the state to the next rank after the last segment of this one."""
        if passed == self._segments.stop and passed < count:
            self._board.put(f"state/{call}/{passed}", pack())

    def agreed_repairs(self, phase: str, again: RepairMasks) -> RepairMasks:
        """Return the batches that have to run again, as decided by the last rank."""
        key, table = f"again/{phase}", TypeAdapter(dict[int, dict[int, frozenset[str]]])
        if not self.ends_batches:
            self._wait_for(key, self.count - 1, self._raise_if_stopped)
            return table.validate_json(self._board.get(key))
        self._board.put(key, table.dump_json({n: dict(masks) for n, masks in again.items()}))
        return again

    def _raise_if_stopped(self) -> None:
        """Raise the error of a batch that has failed in another rank."""
        for rank in range(self.count):
            key = f"stopped/{self._passes}/{rank}"
            if rank != self.rank and self._board.has(key):
                raise _FAILURE.validate_json(self._board.get(key)).as_error()

    def _segments_of(self, rank: int, count: int) -> range:
        return range(count * rank // self.count, count * (rank + 1) // self.count)


def rank_timeout() -> float:
    """Return the seconds without progress after which a rank counts as hung, or raise a ``UsageError``."""
    text = os.environ.get(_LIMIT, str(_HUNG_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"{_LIMIT} is {describe(text)}", hint="set it to a number of seconds, such as 600")
    return seconds


class Board:
    """Entries and counters by key, in a store that all ranks share."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._processes: dict[int, str] = {}

    @classmethod
    def connect(cls, rank: int, name: str = "") -> Board:
        """Connect to the store of ``torchrun``, or of rank 0; ``name`` is that of ``with_ranks``.

        Raises:
            RunFailed: The store cannot be reached.
        """
        with _store_errors():
            board = cls(_store(rank, name))
            beats = _store(-1, name)
        board.put(f"process/{rank}", f"{_machine_name()}:{os.getpid()}".encode())
        threading.Thread(target=_beat, args=(beats, rank), daemon=True).start()
        return board

    def put(self, key: str, data: bytes) -> None:
        """Add an entry; its key must be new."""
        pieces = range(0, len(data), _CHUNK)
        with _store_errors():
            for number, start in enumerate(pieces):
                self._store.set(f"{key}/{number}", data[start : start + _CHUNK])  # type: ignore[arg-type]
            self._store.set(key, str(len(pieces)))

    def has(self, key: str) -> bool:
        """Return whether an entry exists."""
        with _store_errors():
            return bool(self._store.check([key]))

    def get(self, key: str) -> bytes:
        """Return an existing entry."""
        with _store_errors():
            count = int(self._store.get(key))
            return b"".join(self._store.get(f"{key}/{number}") for number in range(count))

    def take(self, key: str) -> bytes:
        """Return an existing entry and remove it."""
        data = self.get(key)
        for number in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)
        return data

    def add(self, counter: str, step: int = 1) -> int:
        """Increase a counter, which starts at 0, and return it."""
        with _store_errors():
            return self._store.add(counter, step)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank's process ran on this machine and has ended."""
        if rank not in self._processes:
            if not self.has(f"process/{rank}"):
                return False
            self._processes[rank] = self.get(f"process/{rank}").decode()
        machine, _, process = self._processes[rank].rpartition(":")
        return machine == _machine_name() and _has_ended(int(process))


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raise ``RunFailed`` if the store does not answer."""
    try:
        yield
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunFailed(
            f"the ranks have lost each other: {first_line(error)}",
            hint=f"see that rank 0 runs, and that all can reach {where}",
        ) from error


def _machine_name() -> str:
    """Return a name of the machine or container, within which process ids are unique."""
    try:
        numbers = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # a system without process namespaces
        numbers = ""
    return f"{socket.gethostname()} {numbers}"


def _has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE  # until its parent reaps it
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _store(rank: int, name: str) -> Store:
    """Connect to the store; rank 0 serves it unless torchrun's agent does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and not name and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=min(_ANSWER_SECONDS, max(_START_SECONDS, rank_timeout())))
    store = TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"ampaudit/{run}/{restart}/{name}", store)


def _beat(store: Store, rank: int) -> None:
    """Increase the heartbeat counter until the process ends."""
    pause = threading.Event()
    while True:
        try:
            store.add(f"alive/{rank}", 1)
        except RuntimeError:  # the store has ended
            return
        pause.wait(_BEAT_SECONDS)
