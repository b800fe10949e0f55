"""Reads zip archives as torch writes them, uncompressed and in one folder; all others are rejected."""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from ampaudit.core.errors import AuditError
from ampaudit.core.untrusted import describe, describe_path, open_regular

MAX_MEMBERS = 1_000_000
_MAX_DIRECTORY = 256_000_000  # bytes of the table of members
# APPNOTE.TXT 6.3.10, sections 4.3.7 to 4.3.16
_LOCAL = struct.Struct("<4s2x2H4x3I2H")
_CENTRAL = struct.Struct("<4s4x2H4x3I3H4xII")
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENCRYPTED, _DESCRIPTOR, _UTF8 = 1, 8, 0x800  # flags
_COMPRESSED = "save it again; of a TorchScript program, torch.save its state_dict()"
_MAX_FIELDS = 16  # after a member's name; torch writes two
_IN_ZIP64 = 0xFFFFFFFF  # instead of a size or offset, which the member's zip64 field holds
_NAME = re.compile(r"(?![A-Za-z]:)(?:(?!\.{1,2}/)[^/\\\0]+/)+(?!\.{1,2}$)[^/\\\0]+")


@dataclass(frozen=True, slots=True)
class Member:
    """The position of a member in the file."""

    header: int  # start of its header
    start: int  # of its bytes
    size: int
    crc32: int  # 0 if none was computed


class Archive:
    """A zip archive, mapped into memory; members are named by their path in its one folder.

    Zip files hold many facts twice. Both must agree, so that no other reader sees other members. ``data`` are
    the bytes of an archive within an archive; by default the whole file.

    Raises:
        AuditError: The file is missing, or not an archive as torch writes it. The error has the type
            ``error``.
    """

    def __init__(self, path: Path, error: type[AuditError], data: memoryview | None = None) -> None:
        self.path = path
        self._error = error
        self._data = memoryview(map_privately(path, error)) if data is None else data
        if len(self._data) < _END.size:
            raise self._broken("it is too short")
        try:
            self.members = self._members()
        except struct.error as cause:
            raise self._broken("it ends within a header") from cause
        if "byteorder" in self.members and self.read("byteorder", 10) != b"little":
            raise self._broken("it was saved on a machine of another byte order", "save it on this machine")

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of a member of at most ``limit`` bytes, and verify their checksum.

        Raises:
            AuditError: There is no such member, or it is too large or changed. The error has the archive's
                type.
        """
        view = self.mapped(name)
        if len(view) > limit:
            raise self._broken(f"{describe(name)} has {len(view):,} bytes; {limit:,} are allowed")
        data = bytes(view)
        # torch writes 0 after torch.serialization.set_crc32_options(False)
        if self.members[name].crc32 not in (0, zlib.crc32(data)):
            raise self._broken(f"the checksum of {describe(name)} differs")
        return data

    def mapped(self, name: str) -> memoryview:
        """Return the bytes of a member without reading them; writes to them do not reach the file.

        Raises:
            AuditError: There is no such member. The error has the archive's type.
        """
        member = self.members.get(name)
        if member is None:
            raise self._broken(f"it has no {describe(name)}")
        return self._data[member.start : member.start + member.size]

    def _members(self) -> dict[str, Member]:
        count, at, end = self._directory()
        members: dict[str, Member] = {}
        directory = self._data[at:end]
        place = 0
        for _ in range(count):
            signature, flags, method, crc32, packed, size, *sizes, mode, offset = _CENTRAL.unpack_from(
                directory, place
            )
            name_size, extra_size, comment_size = sizes
            place += _CENTRAL.size
            raw = bytes(directory[place : place + name_size])
            extra = bytes(directory[place + name_size : place + name_size + extra_size])
            place += name_size + extra_size + comment_size
            if signature != b"PK\x01\x02":
                raise self._broken("its table of members is damaged")
            name = self._name(raw, flags)
            if name in members:
                raise self._broken(f"{describe(name)} occurs twice")
            size, packed, offset = _zip64(extra, size, packed, offset)
            if method or size != packed:
                raise self._broken(f"{describe(name)} is compressed", _COMPRESSED)
            if flags & _ENCRYPTED or stat.S_IFMT(mode >> 16) not in (0, stat.S_IFREG):
                raise self._broken(f"{describe(name)} is encrypted, or not a regular file")
            start = self._start(raw, flags, (crc32, size, packed), offset)
            members[name] = Member(offset, start, size, crc32)
        if place != end - at:
            raise self._broken("its table of members is damaged")
        free = 0
        for name, member in sorted(members.items(), key=lambda item: item[1].header):
            if member.header < free:
                raise self._broken(f"{describe(name)} overlaps another member")
            free = member.start + member.size
        if free > at:
            raise self._broken("a member overlaps the table of members")
        if len({name.partition("/")[0] for name in members}) > 1:
            raise self._broken("its members are not in one folder")
        return {name.partition("/")[2]: member for name, member in members.items()}

    def _directory(self) -> tuple[int, int, int]:
        """Return the number of members, and the start and end of the table of members."""
        end = len(self._data) - _END.size
        signature, disk, first_disk, here, count, size, at, comment = _END.unpack_from(self._data, end)
        if signature != b"PK\x05\x06" or comment:
            raise self._broken("its end is not that of an archive; it may be truncated")
        numbers = (disk, first_disk, here, count, size, at)
        locator = end - _END64_LOCATOR.size
        if locator >= _END64.size and bytes(self._data[locator : locator + 4]) == b"PK\x06\x07":
            end = locator - _END64.size
            _, disk, place, disks = _END64_LOCATOR.unpack_from(self._data, locator)
            signature, length, _, _, *wide = _END64.unpack_from(self._data, end)
            fits = all(a in (b, 0xFFFF, _IN_ZIP64) for a, b in zip(numbers, wide, strict=True))
            expected = b"PK\x06\x06", _END64.size - 12, end, 0, 1
            if (signature, length, place, disk, disks) != expected or not fits:
                raise self._broken("its two end records differ")
            disk, first_disk, here, count, size, at = wide
        if disk or first_disk or here != count or at + size != end:
            raise self._broken("its table of members is not where its end record says")
        if count > MAX_MEMBERS or size > _MAX_DIRECTORY:
            raise self._broken(f"it has {count:,} members; {MAX_MEMBERS:,} are allowed")
        return count, at, end

    def _name(self, raw: bytes, flags: int) -> str:
        try:
            name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
        except UnicodeDecodeError as cause:
            raise self._broken(f"the name {describe(raw)} is not in its encoding") from cause
        if not _NAME.fullmatch(name):
            raise self._broken(f"the name {describe(name)!r} is not that of a file in a folder")
        return name

    def _start(self, raw: bytes, flags: int, central: tuple[int, int, int], offset: int) -> int:
        """Return where the bytes of a member begin: after the header in front of them, which is checked."""
        if offset + _LOCAL.size > len(self._data):
            raise self._broken(f"{describe(raw.decode())} lies outside of the file")
        signature, *local = _LOCAL.unpack_from(self._data, offset)
        own_flags, method, crc32, packed, size, name_size, extra_size = local
        place = offset + _LOCAL.size
        own_name = bytes(self._data[place : place + name_size])
        extra = bytes(self._data[place + name_size : place + name_size + extra_size])
        size, packed, _ = _zip64(extra, size, packed, 0)
        # sizes that were not yet known when the header was written follow the bytes
        later = flags & _DESCRIPTOR and not crc32 and not packed and size in (0, central[1])
        if (signature, own_flags, method, own_name) != (b"PK\x03\x04", flags, 0, raw) or not (
            later or (crc32, size, packed) == central
        ):
            raise self._broken(f"{describe(raw.decode())} is described in two different ways")
        begin: int = place + name_size + extra_size
        return begin

    def _broken(self, what: str, hint: str = "download or save it again") -> AuditError:
        return self._error(f"{describe_path(self.path)}: not an archive of torch: {what}", hint=hint)


def map_privately(path: Path, error: type[AuditError]) -> mmap.mmap:
    """Map a regular file into memory; writes to the mapping do not reach the file.

    Raises:
        AuditError: The file is empty, memory does not suffice, or see ``open_regular``. The error has the
            type ``error``.
    """
    handle = open_regular(path, error)
    try:
        if not os.fstat(handle).st_size:
            raise error(f"{describe_path(path)}: is empty", hint="download or save it again")
        return mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError, OverflowError) as cause:
        raise error(f"{describe_path(path)}: cannot be mapped", hint="free some memory") from cause
    finally:
        os.close(handle)


def _zip64(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Replace those of the numbers that do not fit the header by the values in its zip64 field."""
    numbers = [size, packed, offset]
    place = 0
    for _ in range(_MAX_FIELDS if _IN_ZIP64 in numbers else 0):
        kind, length = struct.unpack_from("<HH", extra, place)
        place += 4
        if kind == 1:
            for index in [i for i, number in enumerate(numbers) if number == _IN_ZIP64]:
                (numbers[index],) = struct.unpack_from("<Q", extra[: place + length], place)
                place, length = place + 8, length - 8
            break
        place += length
    else:
        if place:
            raise struct.error
    return numbers[0], numbers[1], numbers[2]
