"""Writes and reads the part of an audit that one machine has done, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.untrusted import parse_json
from ampaudit.parallel.identity import Identity
from ampaudit.run.record import RunRecord
from ampaudit.run.share import Failure

__all__ = ["KIND", "SCHEMA", "AuditPart", "part_from_json", "part_to_json"]

SCHEMA = 1
_HOW = "write one with: ampaudit scan MODEL --part 1/4 -o part-1.json"
KIND = "part"


@dataclass(frozen=True, slots=True)
class AuditPart:
    """The records of some batches of an audit.

    Attributes:
        kind: ``part``.
        schema: version of this format.
        index: which part, from 0.
        count: of how many.
        location: of the model, as it was given.
        identity: what was audited.
        records: by number of the batch, the record under each policy.
        failure: what ended the run, if something did.
        words: the options of the audit, as on the command line.
    """

    kind: str
    schema: int
    index: int
    count: int
    location: str
    identity: Identity
    records: dict[int, list[RunRecord]]
    failure: Failure | None = None
    words: tuple[str, ...] = ()


def part_to_json(part: AuditPart) -> bytes:
    """Write a part."""
    return _adapter().dump_json(part)


def part_from_json(data: bytes, name: str) -> AuditPart:
    """Read a part, which errors call ``name``; nothing in it is ever run.

    Raises:
        InputError: it is no part of an audit, or of a newer version.
    """
    try:
        found = parse_json(data, finite=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON: {first_line(error)}", hint=_HOW) from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InputError(f"{name}: not a part of an audit", hint=_HOW)
    if isinstance(schema := found.get("schema"), int) and schema > SCHEMA:
        raise InputError(f"{name}: written by a newer ampaudit", hint="merge with that version")
    try:
        return _adapter().validate_python(found)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))[:80]
        raise InputError(f"{name}: {place}: {problem['msg']}", hint=_HOW) from None


def _adapter() -> TypeAdapter[AuditPart]:
    return TypeAdapter(AuditPart)
