"""Writes what one process has recorded to a file, and joins such files to one report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ampaudit.core.config import Progress
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.files import write_text
from ampaudit.core.untrusted import describe, describe_path, read_bounded
from ampaudit.parallel.identity import Identity
from ampaudit.parallel.wire import KIND, SCHEMA, AuditPart, part_from_json, part_to_json
from ampaudit.run.record import RunRecord
from ampaudit.run.share import PartDone, PartRecords, Share, folded

__all__ = ["FilePart", "MergedParts", "parse_part", "read_parts"]

MAX_BYTES = 1 << 30


def parse_part(text: str) -> tuple[int, int]:
    """Return the index, from 0, and the count of ``3/16``.

    Raises:
        UsageError: it is no such text.
    """
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise UsageError(
            f"--part {describe(text)} is not the number of a part and their count",
            hint="write --part 1/4 to --part 4/4",
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
            *(KIND, SCHEMA, self._index, self._count, location, identity, own.records),
            own.failure,
            self._words,
        )
        write_text(path, part_to_json(part).decode(), force=force)
        if own.failure is not None:
            raise own.failure.as_error()
        share = f"{len(own.records)} of {identity.batches} batches"
        return f"part {self._index + 1} of {self._count} written to {path}: {share}"


def read_parts(paths: Sequence[Path]) -> list[tuple[Path, AuditPart]]:
    """Read the files of all parts of one audit.

    Raises:
        InputError: a file is no part, of another audit, there twice, or missing.
    """
    parts = [
        (path, part_from_json(read_bounded(path, MAX_BYTES, InputError), describe_path(path)))
        for path in paths
    ]
    (first, whole), *others = parts
    for path, part in others:
        what = whole.identity.difference(part.identity)
        if not what and (part.count, part.location) != (whole.count, whole.location):
            what = f"{part.count} parts of {describe(part.location)}"
        if what:
            raise InputError(
                f"{describe_path(path)} is of another audit than {describe_path(first)}: it has {what}",
                hint="merge parts that were written with the same files and options",
            )
    _check_complete(parts, whole.count, whole.identity.batches)
    return parts


def _check_complete(parts: Sequence[tuple[Path, AuditPart]], count: int, batches: int) -> None:
    seen = Counter(part.index for _, part in parts)
    twice = [describe_path(path) for path, part in parts if seen[part.index] > 1]
    if twice:
        raise InputError(f"the same part twice: {', '.join(twice)}", hint="give each part once")
    missing = [f"{index + 1}/{count}" for index in range(count) if index not in seen]
    if missing:
        raise InputError(
            f"missing: part {', '.join(missing[:8])}"
            + (f" and {len(missing) - 8} more" if len(missing) > 8 else ""),
            hint=f"write it with: ampaudit scan MODEL --part {missing[0]} -o FILE, and the same options",
        )
    for path, part in parts:
        wanted = set(range(part.index, batches, count))
        if part.failure is None and part.records.keys() != wanted:
            raise InputError(
                f"{describe_path(path)} does not hold the batches of part {part.index + 1}/{count}",
                hint="write the part again",
            )


class MergedParts(Share):
    """Takes the records of parts that others have run.

    What a policy's measured rules decide needs a second pass: it runs here.
    """

    def __init__(self, parts: Sequence[tuple[Path, AuditPart]]) -> None:
        self._parts = parts

    def describe(self, location: str, identity: Identity) -> None:
        """Compare the model, as it is here, with what was audited.

        Raises:
            InputError: it is another one.
        """
        del location
        path, part = self._parts[0]
        if what := identity.difference(part.identity):
            raise InputError(
                f"{describe_path(path)} was written with {what}",
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
            return folded([own])
        return folded([PartRecords(part.records, part.failure) for _, part in self._parts])
