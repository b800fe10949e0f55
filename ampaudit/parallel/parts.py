"""Writes the records of one part of an audit to a file, and merges such files.

The first line describes the audit; each of the others holds the records of one batch, one per policy. So
parts can be joined with one batch in memory at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ampaudit.core.errors import InputError, UsageError, first_line
from ampaudit.core.files import write_bytes
from ampaudit.core.session import Progress
from ampaudit.core.text import listed
from ampaudit.core.untrusted import describe, describe_path, open_regular, parse_json
from ampaudit.parallel.identity import CommandShare, Identity
from ampaudit.run.record import RunRecord
from ampaudit.run.share import Failure, PartDone, PartRecords, join_parts, joined_in_order, raise_first

PART_SCHEMA = 1
_HOW = "write one with: ampaudit scan MODEL --part 1/4 -o part-1.json"
KIND = "part"
T = TypeVar("T")
MAX_LINE = 1 << 28  # bytes of the records of one batch


def parse_part(text: str) -> tuple[int, int]:
    """Parse ``3/16`` into an index, from 0, and a count.

    Raises:
        UsageError: The text is not a part and a count.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        parts = max(count, 4) if match else 4
        raise UsageError(
            f"--part {describe(text)} is not the number of a part and their count",
            hint=f"write --part 1/{parts} to --part {parts}/{parts}",
        )
    return index - 1, count


class FilePart(CommandShare):
    """Runs every n-th batch, from ``index``, and saves its records and the options as words to a file."""

    def __init__(self, index: int, count: int, words: Sequence[str]) -> None:
        self._index, self._count, self._words = index, count, tuple(words)
        self._local: PartRecords | None = None

    def mine(self, phase: str, number: int) -> bool:
        """Return whether a batch belongs to the part."""
        return number % self._count == self._index

    def joined(self, phase: str, local: PartRecords, progress: Progress) -> list[RunRecord]:
        """Store the records for ``save``, and end: ``ampaudit merge`` does the rest."""
        self._local = local
        raise PartDone

    def save(self, path: Path, *, force: bool) -> str:
        """Write the part to a file, and return a message about it.

        Raises:
            OutputError: The file exists or cannot be written.
            AuditError: The error that ended the part, which is written first.
        """
        assert self.about is not None
        assert self._local is not None
        local, (_, identity) = self._local, self.about
        batches = tuple(sorted(local.records))
        part = AuditPart(
            KIND, PART_SCHEMA, self._index, self._count, *self.about, batches, local.failure, self._words
        )
        write_bytes(path, part_file(part, [local.records[number] for number in part.batches]), force=force)
        if local.failure is not None:
            raise local.failure.as_error()
        share = f"{len(local.records)} of {identity.batches} batches"
        return f"part {self._index + 1} of {self._count} written to {path}: {share}"


class PartFile:
    """A part in a file, read line by line; the first line is its ``part``.

    Raises:
        InputError: The file is not a part.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.name = describe_path(path)
        self.part = part_from_json(self._line(), self.name)
        self._digest = hashlib.sha256()

    def records(self) -> list[RunRecord]:
        """Read the records of the next batch; the errors are those of ``records_from_json``."""
        line = self._line()
        self._digest.update(line)
        return records_from_json(line, self.name)

    def check_end(self) -> None:
        """Raise an ``InputError`` if there are lines after the last batch, or a line was changed."""
        if self._line():
            raise InputError(f"{self.name}: more records than batches", hint="write the part again")
        if self._digest.hexdigest() != self.part.digest:
            raise InputError(
                f"{self.name} is damaged: its records are not those that were written",
                hint="write the part again",
            )

    def _line(self) -> bytes:
        """Read the next line. The file is not kept open: there may be more parts than file descriptors."""
        with os.fdopen(open_regular(self._path, InputError), "rb") as stream:
            stream.seek(self._offset)
            line = stream.readline(MAX_LINE + 1)
            self._offset = stream.tell()
        if len(line) > MAX_LINE:
            raise InputError(f"{self.name}: a line of more than {MAX_LINE:,} bytes", hint="check the file")
        return line


def read_parts(paths: Sequence[Path]) -> list[PartFile]:
    """Open the files of all parts of one audit.

    Raises:
        InputError: A file is not a part, belongs to another audit, or is given twice; or a part is missing.
    """
    files = [PartFile(path) for path in paths]
    first, *others = files
    whole = first.part
    for file in others:
        part = file.part
        what = whole.identity.difference(part.identity)
        if not what and (part.count, part.location) != (whole.count, whole.location):
            what = f"{part.count} parts of {describe(part.location)}"
        if what:
            raise InputError(
                f"{file.name} is of another audit than {first.name}: it has {what}",
                hint="merge parts that were written with the same files and options",
            )
    count, batches = whole.count, whole.identity.batches
    counts = Counter(file.part.index for file in files)
    twice = [file.name for file in files if counts[file.part.index] > 1]
    if twice:
        raise InputError(f"the same part twice: {', '.join(twice)}", hint="give each part once")
    missing = [f"{index + 1}/{count}" for index in range(count) if index not in counts]
    if missing:
        raise InputError(
            f"missing: part {listed(missing, 8)}",
            hint=f"write it with: ampaudit scan MODEL --part {missing[0]} -o FILE, and the same options",
        )
    for file in files:
        part = file.part
        if part.failure is None and part.batches != tuple(range(part.index, batches, count)):
            raise InputError(
                f"{file.name} does not hold the batches of part {part.index + 1}/{count}",
                hint="write the part again",
            )
    return files


class MergedParts(CommandShare):
    """Joins the records of all parts, which other processes have run.

    The second pass, for measured rules, runs in this process.

    Raises:
        InputError: The records of a part cannot be read.
    """

    def __init__(self, files: Sequence[PartFile]) -> None:
        self._first = files[0]
        self._failures = [file.part.failure for file in files]
        self._totals: list[RunRecord] = []
        if not any(self._failures):
            owners = sorted((number, i) for i, file in enumerate(files) for number in file.part.batches)
            self._totals = joined_in_order(files[i].records() for _, i in owners)
            for file in files:
                file.check_end()

    def describe(self, location: str, identity: Identity) -> None:
        """Raise an ``InputError`` if the audit differs from that of the parts."""
        if what := identity.difference(self._first.part.identity):
            raise InputError(
                f"{self._first.name} was written with {what}",
                hint="merge where the model, its inputs and the versions are those of the parts",
            )

    def mine(self, phase: str, number: int) -> bool:
        """Return whether a batch runs here, which is only in the second pass."""
        return phase == "re-auditing"

    def joined(self, phase: str, local: PartRecords, progress: Progress) -> list[RunRecord]:
        """Return the joined record of all parts for each policy; see ``Share``."""
        if phase == "re-auditing":
            return join_parts([local])
        raise_first(self._failures)
        return self._totals


@dataclass(frozen=True, slots=True)
class AuditPart:
    """The description of a part of an audit."""

    kind: str  # "part"
    schema: int  # version of this format
    index: int  # from 0
    count: int  # number of parts
    location: str  # of the model, as on the command line
    identity: Identity
    batches: tuple[int, ...]  # numbers of the batches whose records follow, in this order
    failure: Failure | None = None  # error that ended the run
    words: tuple[str, ...] = ()  # options of the audit, as on the command line
    digest: str = ""  # SHA-256 of the lines of a file that follow


_PART = TypeAdapter(AuditPart)
_RECORDS = TypeAdapter(list[RunRecord])


def part_to_json(part: AuditPart) -> bytes:
    """Serialize the description of a part, in one line."""
    return _PART.dump_json(part)


def part_file(part: AuditPart, batches: Sequence[Sequence[RunRecord]]) -> bytes:
    """Return the content of a file with a part and the records of its batches."""
    lines = b"".join(records_to_json(records) + b"\n" for records in batches)
    return part_to_json(replace(part, digest=hashlib.sha256(lines).hexdigest())) + b"\n" + lines


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
    if isinstance(schema := value.get("schema"), int) and schema > PART_SCHEMA:
        raise InputError(f"{name}: written by a newer ampaudit", hint="merge with that version")
    return _validate(_PART, value, name)


def records_from_json(data: bytes, name: str) -> list[RunRecord]:
    """Parse the records of a batch.

    Raises:
        InputError: The data does not hold records.
    """
    return _validate(_RECORDS, _parse(data, name), name)


def records_of_rank(data: bytes, name: str) -> list[RunRecord]:
    """Parse the records sent by another process of this job, in a quarter of the time that a file takes.

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
        raise InputError(
            f"{name}: not a part of an audit, or cut off: {first_line(error)}", hint=_HOW
        ) from None


def _validate(schema: TypeAdapter[T], value: Any, name: str) -> T:
    try:
        return schema.validate_python(value)
    except ValidationError as error:
        raise _invalid(error, name) from None


def _invalid(error: ValidationError, name: str) -> InputError:
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"]))[:80]
    return InputError(f"{name}: {place}: {problem['msg']}", hint=_HOW)
