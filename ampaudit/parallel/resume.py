"""Keeps what an audit has done in a directory, so that it goes on from there after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from ampaudit.core.config import Progress
from ampaudit.core.errors import InputError, OutputError
from ampaudit.core.files import write_bytes
from ampaudit.core.untrusted import describe_path, read_bounded
from ampaudit.parallel.identity import CommandShare, Identity
from ampaudit.parallel.parts import PartFile
from ampaudit.parallel.wire import KIND, SCHEMA, AuditPart, part_to_json, records_to_json
from ampaudit.run.record import RunRecord
from ampaudit.run.share import ALONE, PartRecords, Route, Share

__all__ = ["ResumedShare"]

_AUDIT = "audit.json"
_STATE_BYTES = 1 << 40
_OTHER = "give another directory, or remove this one to start again"
_NEW = "give a new or an empty directory"


class ResumedShare(Share):
    """Saves each batch's record, and each segment's states, in a directory; takes what is there.

    Args:
        directory: made if it does not exist.
        inner: the part of the batches that this process runs.
    """

    def __init__(self, directory: Path, inner: CommandShare | None) -> None:
        self.directory = directory
        self.route = self._kept = _Kept(directory)
        self._inner: Share = ALONE
        self._described = inner
        if isinstance(inner, Share):
            self._inner = inner
        self._about: tuple[str, Identity] | None = None

    def describe(self, location: str, identity: Identity) -> None:
        """Compare what is audited with what the directory is of.

        Raises:
            InputError: it is of another audit, or of none.
            OutputError: it cannot be made.
        """
        self._about = location, identity
        path = self.directory / _AUDIT
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # listed before the file is looked for, which another rank may write meanwhile
            names = [entry.name for entry in self.directory.iterdir()]
            strange = any(not name.startswith(f".{_AUDIT}.") for name in names) and not path.exists()
        except OSError as error:
            raise OutputError(f"{describe_path(self.directory)}: {error.strerror}", hint=_NEW) from None
        if strange:
            raise InputError(
                f"{describe_path(self.directory)} holds other files, and no audit to resume", hint=_NEW
            )
        if path.exists():
            if what := identity.difference(PartFile(path).part.identity):
                raise InputError(
                    f"{describe_path(self.directory)} is of another audit: it has {what}", hint=_OTHER
                )
        else:
            self._write(path)
        if self._described is not None:
            self._described.describe(location, identity)

    def mine(self, phase: str, number: int) -> bool:
        """Return whether this process runs a batch, if it was not run earlier."""
        return self._inner.mine(phase, number)

    def progress_of(self, phase: str) -> str:
        """Return a phase as the other share does."""
        return self._inner.progress_of(phase)

    def recorded(self, phase: str, number: int) -> list[RunRecord] | None:
        """Return the record of a batch that was run earlier.

        Raises:
            InputError: its file is none of this audit.
        """
        path = self._path(phase, number)
        if not path.exists() or not self._inner.mine(phase, number):
            return None
        file = self._file(path)
        if self._about is None or file.part.identity != self._about[1] or file.part.batches != (number,):
            raise InputError(f"{file.name} is not of this audit", hint=_OTHER)
        try:
            return file.records()
        except InputError as error:
            again = f"remove {file.name}: its batch runs again"
            raise InputError(str(error.args[0]), hint=again) from None

    def record(self, phase: str, number: int, records: list[RunRecord]) -> None:
        """Save the record of a batch, and remove the states that led to it."""
        self._write(self._path(phase, number), (number,), records_to_json(records))
        self._kept.forget(phase, number)
        self._inner.record(phase, number, records)

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        """Join records as the other share does."""
        return self._inner.joined(phase, own, progress)

    def finish(self) -> None:
        """End as the other share does."""
        self._inner.finish()

    def _path(self, phase: str, number: int) -> Path:
        return self.directory / f"{phase}-{number}.json"

    def _file(self, path: Path) -> PartFile:
        """Open the record of a batch.

        Raises:
            InputError: it is damaged.
        """
        try:
            return PartFile(path)
        except InputError as error:
            again = f"remove {describe_path(path)}: its batch runs again"
            raise InputError(str(error.args[0]), hint=again) from None

    def _write(self, path: Path, batches: tuple[int, ...] = (), records: bytes = b"") -> None:
        assert self._about is not None, "it is said what is audited before anything is run"
        part = AuditPart(KIND, SCHEMA, 0, 1, *self._about, batches)
        write_bytes(path, part_to_json(part) + b"\n" + records, force=True)


class _Kept(Route):
    """All segments run in this process, and their states are kept in a directory."""

    keeps = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def limit(self, memory: int) -> int:
        """Return the memory that was chosen first, so that the program is cut as it was then."""
        path, number = self._directory / "memory.json", TypeAdapter(int)
        if not path.exists():
            write_bytes(path, number.dump_json(memory), force=True)
            return memory
        try:
            return number.validate_json(read_bounded(path, 64, InputError))
        except ValueError:
            raise InputError(f"{describe_path(path)} is not a number of bytes", hint=_OTHER) from None

    def passed(self, call: str) -> int:
        """Return how many segments a call has passed earlier."""
        return max((int(path.suffixes[-2][1:]) for path in self._states(call)), default=0)

    def load(self, call: str) -> bytes:
        """Return the state of a call that has passed segments earlier."""
        path = self._directory / f"{call}.{self.passed(call)}.state"
        return read_bounded(path, _STATE_BYTES, InputError)

    def save(self, call: str, passed: int, count: int, pack: Callable[[], bytes]) -> None:
        """Keep the state of a call after a segment instead of the one before."""
        del count
        earlier = list(self._states(call))
        write_bytes(self._directory / f"{call}.{passed}.state", pack(), force=True)
        for path in earlier:
            path.unlink(missing_ok=True)

    def forget(self, phase: str, number: int) -> None:
        """Remove all states of a batch."""
        for path in self._directory.glob(f"{phase}-*-{number}-*.*.state"):
            path.unlink(missing_ok=True)

    def _states(self, call: str) -> list[Path]:
        found = self._directory.glob(f"{call}.*.state")
        return [path for path in found if path.suffixes[-2][1:].isdecimal()]
