"""Saves the progress of an audit in a directory, so that an interrupted audit can be resumed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from pydantic import TypeAdapter

from ampaudit.core.errors import InputError, OutputError
from ampaudit.core.files import write_bytes
from ampaudit.core.session import Progress
from ampaudit.core.untrusted import describe_path, read_bounded
from ampaudit.parallel.identity import CommandShare, Identity
from ampaudit.parallel.parts import KIND, PART_SCHEMA, AuditPart, PartFile, part_file
from ampaudit.run.record import RunRecord
from ampaudit.run.share import ALONE, PartRecords, Share

_AUDIT = "audit.json"
_STATE_BYTES = 1 << 40
_OTHER = "give another directory, or remove this one to start again"
_NEW = "give a new or an empty directory"


class ResumedShare(CommandShare):
    """Saves each batch's records and each segment's states in a directory, and reuses saved ones.

    The inner share says which batches this process runs, each through all segments; all by default.
    """

    keeps_states = True

    def __init__(self, directory: Path, inner: CommandShare | None) -> None:
        self.directory = directory
        self._inner: Share = inner or ALONE

    def describe(self, location: str, identity: Identity) -> None:
        """Compare the audit with that of the directory.

        Raises:
            InputError: The directory belongs to another audit or holds other files.
            OutputError: The directory cannot be created.
        """
        super().describe(location, identity)
        path = self.directory / _AUDIT
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # list first: another rank may write the file meanwhile
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
        if isinstance(self._inner, CommandShare):
            self._inner.describe(location, identity)

    def mine(self, phase: str, number: int) -> bool:
        """Return whether this process runs a batch that has no saved record."""
        return self._inner.mine(phase, number)

    def progress_of(self, phase: str) -> str:
        """Return the progress of the inner share."""
        return self._inner.progress_of(phase)

    def check_others(self) -> None:
        """Check other machines with the inner share."""
        self._inner.check_others()

    def recorded(self, phase: str, number: int) -> list[RunRecord] | None:
        """Return the saved records of a batch; ``None`` without them.

        Raises:
            InputError: The file is damaged or belongs to another audit.
        """
        path = self._path(phase, number)
        if not path.exists() or not self._inner.mine(phase, number):
            return None
        try:
            file = PartFile(path)
            if self.about and file.part.identity == self.about[1] and file.part.batches == (number,):
                records = file.records()
                file.check_end()
                return records
        except InputError as error:
            again = f"remove {describe_path(path)}: its batch runs again"
            raise InputError(str(error.args[0]), hint=again) from None
        raise InputError(f"{file.name} is not of this audit", hint=_OTHER)

    def record(self, phase: str, number: int, records: list[RunRecord]) -> None:
        """Save the records of a batch, and remove its states."""
        self._write(self._path(phase, number), (number,), [records])
        for state in self.directory.glob(f"{phase}-*-{number}-*.*.state"):
            state.unlink(missing_ok=True)
        self._inner.record(phase, number, records)

    def joined(self, phase: str, local: PartRecords, progress: Progress) -> list[RunRecord]:
        """Join records with the inner share."""
        return self._inner.joined(phase, local, progress)

    def finish(self) -> None:
        """Finish the inner share."""
        self._inner.finish()

    def _path(self, phase: str, number: int) -> Path:
        return self.directory / f"{phase}-{number}.json"

    def _write(
        self, path: Path, batches: tuple[int, ...] = (), records: Sequence[list[RunRecord]] = ()
    ) -> None:
        assert self.about is not None, "describe() comes before any batch"
        part = AuditPart(KIND, PART_SCHEMA, 0, 1, *self.about, batches)
        write_bytes(path, part_file(part, records), force=True)

    def memory_limit(self, memory: int) -> int:
        """Return the memory limit of the first run, so that the program has the same segments."""
        path, number = self.directory / "memory.json", TypeAdapter(int)
        if not path.exists():
            write_bytes(path, number.dump_json(memory), force=True)
            return memory
        try:
            return number.validate_json(read_bounded(path, 64, InputError))
        except ValueError:
            raise InputError(f"{describe_path(path)} is not a number of bytes", hint=_OTHER) from None

    def segments_passed(self, call: str) -> int:
        """Return the number of segments that a call has already passed."""
        return max((int(path.suffixes[-2][1:]) for path in self._states(call)), default=0)

    def load_state(self, call: str) -> bytes:
        """Return the saved state of a call.

        Raises:
            InputError: The file is damaged.
        """
        path = self.directory / f"{call}.{self.segments_passed(call)}.state"
        data = read_bounded(path, _STATE_BYTES, InputError)
        try:  # torch.load does not compare checksums
            damaged = ZipFile(io.BytesIO(data)).testzip() is not None
        except BadZipFile:
            damaged = True
        if damaged:
            again = f"remove {describe_path(path)}: its batch runs again"
            raise InputError(f"{describe_path(path)} is damaged", hint=again)
        return data

    def save_state(self, call: str, passed: int, count: int, pack: Callable[[], bytes]) -> None:
        """Save the state of a call after a segment, and remove the previous one."""
        earlier = list(self._states(call))
        write_bytes(self.directory / f"{call}.{passed}.state", pack(), force=True)
        for path in earlier:
            path.unlink(missing_ok=True)

    def _states(self, call: str) -> list[Path]:
        paths = self.directory.glob(f"{call}.*.state")
        return [path for path in paths if path.suffixes[-2][1:].isdecimal()]
