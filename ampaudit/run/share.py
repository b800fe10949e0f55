"""Divides the batches of an audit among machines, and joins their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampaudit.core.errors import AuditError
from ampaudit.core.session import Progress
from ampaudit.run.record import RunRecord

RepairMasks = Mapping[int, Mapping[int, frozenset[str]]]  # sites of masks by batch and policy


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a run, as data."""

    batch: int  # number of the batch that could not be audited
    kind: str  # name of the error's class
    message: str  # its message
    hint: str  # its hint

    @classmethod
    def of(cls, batch: int, error: AuditError) -> Failure:
        """Convert an error to data."""
        return cls(batch, type(error).__name__, str(error.args[0]), error.hint)

    def as_error(self) -> AuditError:
        """Convert the data back to an error."""
        kinds = {kind.__name__: kind for kind in _subclasses(AuditError)}
        return kinds.get(self.kind, AuditError)(self.message, hint=self.hint)


@dataclass(frozen=True, slots=True)
class PartRecords:
    """The records of one machine's pass over its batches."""

    records: dict[int, list[RunRecord]]  # record under each policy, by number of the batch
    failure: Failure | None = None  # error that ended the pass, if any


BatchNumbers = dict[int, list[float]]  # results of each batch, by its number


class PartDone(Exception):
    """Raised on machines whose part is done, while another machine continues with their records."""


class Share:
    """The batches and segments that this machine runs (by default all), and how records are joined.

    Batches pass through the segments of a program within one process, or from one to the next.
    """

    alone = False  # whether records are joined as they arrive, and errors are raised immediately
    keeps_states = False  # whether the states of calls are saved after each segment
    follows = False  # whether another machine tells this one what to run

    def mine(self, phase: str, number: int) -> bool:
        """Return whether this machine runs a batch in a phase."""
        return True

    def progress_of(self, phase: str) -> str:
        """Return a phase with the progress of other machines, for display."""
        return phase

    def check_others(self) -> None:
        """Let other machines know that this one makes progress, and see that they do.

        Raises:
            AuditError: A machine is lost.
            PartDone: The machine that writes the report has ended.
        """

    def recorded(self, phase: str, number: int) -> list[RunRecord] | None:
        """Return the record of a batch under each policy, if it has been run before."""
        return None

    def record(self, phase: str, number: int, records: list[RunRecord]) -> None:
        """Store the record of a batch under each policy once it is complete."""

    def joined(self, phase: str, part: PartRecords, progress: Progress) -> list[RunRecord]:
        """Return the record under each policy over all batches, on every machine.

        Raises:
            AuditError: A batch could not be audited (the first one is reported), or a machine is lost.
            PartDone: Another machine continues.
        """
        return join_parts([part])

    def gathered(self, numbers: BatchNumbers) -> BatchNumbers:
        """Return the numbers of all batches, in order.

        Raises:
            AuditError: A machine is lost.
            PartDone: Another machine continues.
        """
        return numbers

    def tell(self, *task: str) -> None:
        """Tell the machines that follow this one what to run next."""

    def tasks(self) -> Iterator[list[str]]:
        """Yield the tasks that this machine is told to run, if it follows another one.

        Raises:
            PartDone: There are no more tasks.
        """
        yield from ()

    @property
    def ends_batches(self) -> bool:
        """Whether batches end in this process, which then analyzes their runs."""
        return True

    def stages(self) -> int:
        """Return the number of processes that share the segments of a program."""
        return 1

    def local_segments(self, count: int) -> range:
        """Return the segments, out of ``count``, that run in this process."""
        return range(count)

    def memory_limit(self, memory: int) -> int:
        """Return the memory within which the program is cut."""
        return memory

    def segments_passed(self, call: str) -> int:
        """Return the number of segments that a call has already passed, here or elsewhere."""
        return 0

    def load_state(self, call: str) -> bytes:
        """Return the state of a call after the segments that it has passed."""
        raise KeyError(call)

    def save_state(self, call: str, passed: int, count: int, pack: Callable[[], bytes]) -> None:
        """Save or send the state of a call that has passed ``passed`` of ``count`` segments."""

    def agreed_repairs(self, phase: str, again: RepairMasks) -> RepairMasks:
        """Return the masks of all runs that need repairs, by batch and policy.

        ``again`` holds the masks of the runs that ended in this process.
        """
        return again

    def finish(self) -> None:
        """End the work of machines that do not write a report.

        Raises:
            PartDone: This machine is one of them.
        """


class _Alone(Share):
    alone = True


ALONE: Share = _Alone()


def join_parts(parts: Sequence[PartRecords]) -> list[RunRecord]:
    """Join the records of all parts in the order of their batches.

    Raises:
        AuditError: A batch could not be audited; the first one is reported.
    """
    raise_first(part.failure for part in parts)
    batches = {number: records for part in parts for number, records in part.records.items()}
    return joined_in_order(batches[number] for number in sorted(batches))


def raise_first(failures: Iterable[Failure | None]) -> None:
    """Raise the error of the first batch that could not be audited, if any."""
    actual = [failure for failure in failures if failure is not None]
    if actual:
        raise min(actual, key=lambda failure: failure.batch).as_error()


def joined_in_order(batches: Iterable[Sequence[RunRecord]]) -> list[RunRecord]:
    """Join the records of batches, which arrive in order, without keeping them."""
    totals: list[RunRecord] = []
    for records in batches:
        totals = totals or [RunRecord(record.device, record.backend) for record in records]
        for total, record in zip(totals, records, strict=True):
            total.join(record)
    return totals


def _subclasses(kind: type[AuditError]) -> list[type[AuditError]]:
    return [kind, *(kinds for sub in kind.__subclasses__() for kinds in _subclasses(sub))]
