"""Writes and reads the part of an audit that one machine has done, as lines of JSON.

The first line says what was audited; each of the others holds the records of one batch, one per policy. So
whoever joins parts holds one batch at a time, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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
    """What a part of an audit is about.

    Attributes:
        kind: ``part``.
        schema: version of this format.
        index: which part, from 0.
        count: of how many.
        location: of the model, as it was given.
        identity: what was audited.
        batches: numbers of the batches whose records follow, in their order.
        failure: what ended the run, if something did.
        words: the options of the audit, as on the command line.
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


def part_to_json(part: AuditPart) -> bytes:
    """Write what a part is about, in one line."""
    return _part_schema().dump_json(part)


def records_to_json(records: Sequence[RunRecord]) -> bytes:
    """Write the records of a batch in one line, without the fields that are as in an empty record."""
    return _records_schema().dump_json(list(records), exclude_defaults=True)


def part_from_json(data: bytes, name: str) -> AuditPart:
    """Read what a part is about; errors call the part ``name``.

    Raises:
        InputError: it is no part of an audit, or of a newer version.
    """
    found = _parsed(data, name)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InputError(f"{name}: not a part of an audit", hint=_HOW)
    if isinstance(schema := found.get("schema"), int) and schema > SCHEMA:
        raise InputError(f"{name}: written by a newer ampaudit", hint="merge with that version")
    return _validated(_part_schema(), found, name)


def records_from_json(data: bytes, name: str) -> list[RunRecord]:
    """Read the records of a batch; nothing in them is ever run.

    Raises:
        InputError: they are none.
    """
    return _validated(_records_schema(), _parsed(data, name), name)


def records_of_rank(data: bytes, name: str) -> list[RunRecord]:
    """Read the records that another process of this job has sent: as above, in a quarter of the time.

    A file may name a field twice or hold numbers that no field takes; what ``records_to_json`` made does not.

    Raises:
        InputError: they are none.
    """
    try:
        return _records_schema().validate_json(data)
    except ValidationError as error:
        raise _refusal(error, name) from None


def _parsed(data: bytes, name: str) -> Any:
    try:
        return parse_json(data, finite=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not a whole part of an audit: {first_line(error)}", hint=_HOW) from None


def _validated(schema: TypeAdapter[T], found: Any, name: str) -> T:
    try:
        return schema.validate_python(found)
    except ValidationError as error:
        raise _refusal(error, name) from None


def _refusal(error: ValidationError, name: str) -> InputError:
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"]))[:80]
    return InputError(f"{name}: {place}: {problem['msg']}", hint=_HOW)


@cache
def _part_schema() -> TypeAdapter[AuditPart]:
    return TypeAdapter(AuditPart)


@cache
def _records_schema() -> TypeAdapter[list[RunRecord]]:
    return TypeAdapter(list[RunRecord])
