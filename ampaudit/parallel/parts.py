"""Writes what one process has recorded to a file, and joins such files to one report."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ampaudit.core.config import Progress
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.files import write_bytes
from ampaudit.core.text import listed
from ampaudit.core.untrusted import describe, describe_path, open_regular
from ampaudit.parallel.identity import Identity
from ampaudit.parallel.wire import (
    KIND,
    SCHEMA,
    AuditPart,
    part_from_json,
    part_to_json,
    records_from_json,
    records_to_json,
)
from ampaudit.run.record import RunRecord
from ampaudit.run.share import PartDone, PartRecords, Share, join_parts, joined_in_order, raise_first

__all__ = ["FilePart", "MergedParts", "PartFile", "parse_part", "read_parts"]

MAX_LINE = 1 << 28  # bytes: the records of one batch


def parse_part(text: str) -> tuple[int, int]:
    """Return the index, from 0, and the count of ``3/16``.

    Raises:
        UsageError: it is no such text.
    """
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        parts = max(count, 4) if found else 4
        raise UsageError(
            f"--part {describe(text)} is not the number of a part and their count",
            hint=f"write --part 1/{parts} to --part {parts}/{parts}",
        )
    return index - 1, count


class FilePart(Share):
    """Runs every n-th batch, and keeps what was recorded for a file.

    Args:
        index: of the part, from 0.
        count: of parts.
        words: the options of the audit, as on the command line.
    """

    def __init__(self, index: int, count: int, words: Sequence[str]) -> None:
        self._index, self._count, self._words = index, count, tuple(words)
        self._about: tuple[str, Identity] | None = None
        self._own: PartRecords | None = None

    def describe(self, location: str, identity: Identity) -> None:
        """Say what is audited."""
        self._about = location, identity

    def mine(self, phase: str, number: int) -> bool:
        """Return whether a batch belongs to the part."""
        del phase
        return number % self._count == self._index

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        """Keep the records.

        Raises:
            PartDone: always: ``ampaudit merge`` goes on.
        """
        del phase, progress
        self._own = own
        raise PartDone

    def save(self, path: Path, *, force: bool) -> str:
        """Write the part to a file, and return a line that says so.

        Raises:
            OutputError: the file exists, or cannot be written.
            AuditError: what ended the part; it is written nevertheless.
        """
        assert self._about is not None
        assert self._own is not None
        own, (location, identity) = self._own, self._about
        part = AuditPart(
            *(KIND, SCHEMA, self._index, self._count, location, identity, tuple(sorted(own.records))),
            own.failure,
            self._words,
        )
        lines = (part_to_json(part), *(records_to_json(own.records[number]) for number in part.batches))
        write_bytes(path, b"".join(line + b"\n" for line in lines), force=force)
        if own.failure is not None:
            raise own.failure.as_error()
        share = f"{len(own.records)} of {identity.batches} batches"
        return f"part {self._index + 1} of {self._count} written to {path}: {share}"


class PartFile:
    """A part in a file, of which one line at a time is in memory.

    Args:
        path: of the file.

    Attributes:
        part: what it is about.

    Raises:
        InputError: it is no part.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.name = describe_path(path)
        self.part = part_from_json(self._line(), self.name)

    def records(self) -> list[RunRecord]:
        """Return the records of the next of its batches.

        Raises:
            InputError: they are none.
        """
        return records_from_json(self._line(), self.name)

    def check_end(self) -> None:
        """Refuse a file that holds more than its batches.

        Raises:
            InputError: it does.
        """
        if self._line():
            raise InputError(f"{self.name}: more records than batches", hint="write the part again")

    def _line(self) -> bytes:
        """Read the next line: the file is not kept open, as there may be more parts than files may be."""
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
        InputError: a file is no part, of another audit, there twice, or missing.
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
    _check_complete(files, whole.count, whole.identity.batches)
    return files


def _check_complete(files: Sequence[PartFile], count: int, batches: int) -> None:
    seen = Counter(file.part.index for file in files)
    twice = [file.name for file in files if seen[file.part.index] > 1]
    if twice:
        raise InputError(f"the same part twice: {', '.join(twice)}", hint="give each part once")
    missing = [f"{index + 1}/{count}" for index in range(count) if index not in seen]
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


def _folded(files: Sequence[PartFile]) -> list[RunRecord]:
    """Join the records of files, of which each holds its batches in their order."""
    owners = sorted((number, place) for place, file in enumerate(files) for number in file.part.batches)
    totals = joined_in_order(files[place].records() for _, place in owners)
    for file in files:
        file.check_end()
    return totals


class MergedParts(Share):
    """Takes the records of parts that others have run.

    What a policy's measured rules decide needs a second pass: it runs here.

    Args:
        files: all parts.

    Raises:
        InputError: the records of a part cannot be read.
    """

    def __init__(self, files: Sequence[PartFile]) -> None:
        self._first = files[0]
        self._failures = [file.part.failure for file in files]
        self._totals = _folded(files) if not any(self._failures) else []

    def describe(self, location: str, identity: Identity) -> None:
        """Compare the model, as it is here, with what was audited.

        Raises:
            InputError: it is another one.
        """
        del location
        if what := identity.difference(self._first.part.identity):
            raise InputError(
                f"{self._first.name} was written with {what}",
                hint="merge where the model, its inputs and the versions are those of the parts",
            )

    def mine(self, phase: str, number: int) -> bool:
        """Return whether a batch runs here: in the second pass."""
        del number
        return phase == "re-auditing"

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        """Return the record of all parts under each policy.

        Raises:
            AuditError: the first batch that could not be audited.
        """
        del progress
        if phase == "re-auditing":
            return join_parts([own])
        raise_first(self._failures)
        return self._totals
