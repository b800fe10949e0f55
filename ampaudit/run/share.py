"""Divides the batches of an audit among machines, and joins what they have recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampaudit.core.config import Progress
from ampaudit.core.errors import AuditError
from ampaudit.run.record import RunRecord

__all__ = [
    "ALONE",
    "Again",
    "BatchNumbers",
    "Failure",
    "PartDone",
    "PartRecords",
    "Route",
    "Share",
    "folded",
    "joined_in_order",
    "raise_first",
]

Again = Mapping[int, Mapping[int, frozenset[str]]]


class Route:
    """The way of every batch through the segments; this one stays in this process.

    Attributes:
        keeps: whether states are to be saved after each segment.
    """

    keeps = False

    @property
    def ends(self) -> bool:
        """Whether batches end in this process, which then judges their runs."""
        return True

    def own(self, count: int) -> range:
        """Return the segments, of so many, that run in this process."""
        return range(count)

    def limit(self, memory: int) -> int:
        """Return the memory within which the program is cut."""
        return memory

    def stages(self) -> int:
        """Return how many processes the segments are divided among."""
        return 1

    def passed(self, call: str) -> int:
        """Return how many segments a call has passed before it comes here."""
        del call
        return 0

    def load(self, call: str) -> bytes:
        """Return the state of a call that has passed segments elsewhere, or earlier."""
        raise KeyError(call)

    def save(self, call: str, passed: int, count: int, pack: Callable[[], bytes]) -> None:
        """Keep the state of a call that has passed so many segments of all, or hand it on."""

    def agreed(self, phase: str, again: Again | None) -> Again:
        """Return, by batch and run, the masks of those that have to run again with repairs.

        Args:
            phase: of the audit.
            again: of what ended in this process; ``None`` if nothing did.
        """
        del phase
        return again or {}


HERE = Route()


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a run, as data.

    Attributes:
        batch: number of the batch that could not be audited.
        kind: name of the error's class.
        message: what failed.
        hint: what to do next.
    """

    batch: int
    kind: str
    message: str
    hint: str

    @classmethod
    def of(cls, batch: int, error: AuditError) -> Failure:
        """Return an error as data."""
        return cls(batch, type(error).__name__, str(error.args[0]), error.hint)

    def as_error(self) -> AuditError:
        """Return the error again."""
        kinds = {kind.__name__: kind for kind in _subclasses(AuditError)}
        return kinds.get(self.kind, AuditError)(self.message, hint=self.hint)


@dataclass(frozen=True, slots=True)
class PartRecords:
    """What one machine has recorded in one pass over its batches.

    Attributes:
        records: by number of the batch, the record under each policy.
        failure: what ended the pass, if something did.
    """

    records: dict[int, list[RunRecord]]
    failure: Failure | None = None


BatchNumbers = dict[int, list[float]]  # numbers about each batch


class PartDone(Exception):
    """Raised where another machine goes on with what this one has recorded."""


class Share:
    """The batches that this machine runs, and how it joins what all have recorded: here, all of them.

    Attributes:
        alone: whether records are joined as they are made, and an error is raised at once.
        route: the segments that this machine runs.
        follows: whether another machine tells this one what to run.
    """

    alone = False
    route: Route = HERE
    follows = False

    def mine(self, phase: str, number: int) -> bool:
        """Return whether this machine runs a batch in a phase."""
        del phase, number
        return True

    def progress_of(self, phase: str) -> str:
        """Return a phase with how far other machines are, for who watches."""
        return phase

    def recorded(self, phase: str, number: int) -> list[RunRecord] | None:
        """Return the record of a batch under each policy, if it was run earlier."""
        del phase, number
        return None

    def record(self, phase: str, number: int, records: list[RunRecord]) -> None:
        """Take the record of a batch under each policy as soon as it is complete."""

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        """Return the record under each policy over all batches, on every machine.

        Raises:
            AuditError: the first batch, by number, that could not be audited; or a machine is lost.
            PartDone: another machine goes on.
        """
        del phase, progress
        return folded([own])

    def gathered(self, own: BatchNumbers) -> BatchNumbers:
        """Return the numbers of all batches, in their order.

        Raises:
            AuditError: a machine is lost.
            PartDone: another machine has them.
        """
        return own

    def tell(self, *task: str) -> None:
        """Tell the machines that follow this one what is run next."""

    def tasks(self) -> Iterator[list[str]]:
        """Yield what this machine is told to run, if it follows another one.

        Raises:
            PartDone: there is nothing more to do.
        """
        yield from ()

    def finish(self) -> None:
        """End the work of machines that have no report to make.

        Raises:
            PartDone: this is one of them.
        """


class _Alone(Share):
    alone = True


ALONE: Share = _Alone()


def folded(parts: Sequence[PartRecords]) -> list[RunRecord]:
    """Join the records of all parts in the order of their batches.

    Raises:
        AuditError: the first batch, by number, that could not be audited.
    """
    raise_first(part.failure for part in parts)
    batches = {number: records for part in parts for number, records in part.records.items()}
    return joined_in_order(batches[number] for number in sorted(batches))


def raise_first(failures: Iterable[Failure | None]) -> None:
    """Raise the error of the first batch, by number, that could not be audited, if there is one.

    Raises:
        AuditError: this error.
    """
    found = [failure for failure in failures if failure is not None]
    if found:
        raise min(found, key=lambda failure: failure.batch).as_error()


def joined_in_order(batches: Iterable[Sequence[RunRecord]]) -> list[RunRecord]:
    """Join the records of batches, which come in their order; each is let go once it is joined."""
    totals: list[RunRecord] = []
    for records in batches:
        totals = totals or [RunRecord(record.device, record.backend) for record in records]
        for total, record in zip(totals, records, strict=True):
            total.join(record)
    return totals


def _subclasses(kind: type[AuditError]) -> list[type[AuditError]]:
    return [kind, *(found for sub in kind.__subclasses__() for found in _subclasses(sub))]
