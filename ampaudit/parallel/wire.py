"""Serializes the part of an audit that one process has run, as lines of JSON.

The first line describes the audit; each of the others holds the records of one batch, one per policy. So
parts can be joined with one batch in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.untrusted import parse_json
from ampaudit.parallel.identity import Identity
from ampaudit.run.record import RunRecord
from ampaudit.run.share import Failure

__all__ = [
    "KIND",
    "SCHEMA",
    "AuditPart",
    "part_from_json",
    "part_to_json",
    "records_from_json",
    "records_of_rank",
    "records_to_json",
]

SCHEMA = 1
_HOW = "write one with: ampaudit scan MODEL --part 1/4 -o part-1.json"
KIND = "part"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AuditPart:
    """The description of a part of an audit.

    Attributes:
        kind: ``part``.
        schema: Version of this format.
        index: Index of the part, from 0.
        count: Number of parts.
        location: Location of the model, as on the command line.
        identity: Fingerprint of the audit.
        batches: Numbers of the batches whose records follow, in this order.
        failure: Error that ended the run; ``None`` if it is complete.
        words: Options of the audit, as on the command line.
    """

    kind: str
    schema: int
    index: int
    count: int
    location: str
    identity: Identity
    batches: tuple[int, ...]
    failure: Failure | None = None
    words: tuple[str, ...] = ()


_PART = TypeAdapter(AuditPart)
_RECORDS = TypeAdapter(list[RunRecord])


def part_to_json(part: AuditPart) -> bytes:
    """Serialize the description of a part, in one line."""
    return _PART.dump_json(part)


def records_to_json(records: Sequence[RunRecord]) -> bytes:
    """Serialize the records of a batch in one line, without fields at their defaults."""
    return _RECORDS.dump_json(list(records), exclude_defaults=True)


def part_from_json(data: bytes, name: str) -> AuditPart:
    """Parse the description of a part; ``name`` stands for it in errors.

    Raises:
        InputError: The data is not a part of an audit, or from a newer version.
    """
    value = _parse(data, name)
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise InputError(f"{name}: not a part of an audit", hint=_HOW)
    if isinstance(schema := value.get("schema"), int) and schema > SCHEMA:
        raise InputError(f"{name}: written by a newer ampaudit", hint="merge with that version")
    return _validate(_PART, value, name)


def records_from_json(data: bytes, name: str) -> list[RunRecord]:
    """Parse the records of a batch.

    Raises:
        InputError: The data does not hold records.
    """
    return _validate(_RECORDS, _parse(data, name), name)


def records_of_rank(data: bytes, name: str) -> list[RunRecord]:
    """Parse the records sent by another process of this job, in a quarter of the time.

    Unlike a file, the output of ``records_to_json`` has no duplicate names or oversized numbers.
    """
    try:
        return _RECORDS.validate_json(data)
    except ValidationError as error:
        raise _invalid(error, name) from None


def _parse(data: bytes, name: str) -> Any:
    try:
        return parse_json(data, finite=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not a whole part of an audit: {first_line(error)}", hint=_HOW) from None


def _validate(schema: TypeAdapter[T], value: Any, name: str) -> T:
    try:
        return schema.validate_python(value)
    except ValidationError as error:
        raise _invalid(error, name) from None


def _invalid(error: ValidationError, name: str) -> InputError:
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"]))[:80]
    return InputError(f"{name}: {place}: {problem['msg']}", hint=_HOW)
