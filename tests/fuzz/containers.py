"""Mutators of files that hold other files or values: zip archives, pickles and safetensors."""

from __future__ import annotations

import io
import pickletools
import stat
import struct
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatch
from random import Random

from tests.fuzz.mutators import CANARY, WORDS, Mutator, as_bytes, as_json

Members = list[tuple[zipfile.ZipInfo, bytes]]
_NAMES = ("../escaped", "/tmp/escaped", "a/../../escaped", "C:\\escaped", "a//b", "", "x" * 60_000, "a\0b")
_GLOBALS = (
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    (CANARY, "Class"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "FloatStorage"),
    ("torch.serialization", "load"),
    ("collections", "OrderedDict"),
    ("torch.jit", "load"),
)


def members_of(data: bytes) -> Members:
    """Read the members of an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info, archive.read(info)) for info in archive.infolist()]


def zip_of(members: Members) -> bytes:
    """Write an archive; unlike ``zipfile``, without a warning about repeated names."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for info, data in members:
            archive.NameToInfo.pop(info.filename, None)
            archive.writestr(_copy(info), data)
    return out.getvalue()


def _copy(info: zipfile.ZipInfo, name: str | None = None) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo(info.filename if name is None else name, date_time=info.date_time)
    made.compress_type, made.external_attr, made.create_system = info.compress_type, info.external_attr, 3
    made.filename = info.filename if name is None else name  # ZipInfo cuts it at a zero
    return made


def as_zip(mutators: Mapping[str, Mutator]) -> Mutator:
    """Mutate one member by its name, the list of members, or the records of the archive."""

    def mutate(random: Random, data: bytes) -> bytes:
        try:
            members = members_of(data)
        except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError):
            return as_bytes(random, data)
        kind = random.randrange(12)
        if kind == 0 or not members:
            return as_bytes(random, data)
        if kind == 1:
            return _lie_about_a_record(random, data)
        if kind == 2:
            return zip_of(_change_the_list(random, members))
        at = _choose(random, members, mutators)
        info, content = members[at]
        chosen = next((m for pattern, m in mutators.items() if fnmatch(info.filename, pattern)), as_bytes)
        members[at] = info, chosen(random, content)
        return zip_of(members)

    return mutate


def _choose(random: Random, members: Members, mutators: Mapping[str, Mutator]) -> int:
    """Choose a member that has a mutator of its own most of the time."""
    known = [i for i, (info, _) in enumerate(members) if any(fnmatch(info.filename, p) for p in mutators)]
    return random.choice(known) if known and random.randrange(5) else random.randrange(len(members))


def _change_the_list(random: Random, members: Members) -> Members:
    at, other = random.randrange(len(members)), random.randrange(len(members))
    info, content = members[at]
    kind = random.randrange(7)
    if kind == 0:
        return members[:at] + members[at + 1 :]
    if kind == 1:
        return [*members, (info, as_bytes(random, content))]
    if kind == 2:
        members[at], members[other] = (info, members[other][1]), (members[other][0], content)
        return members
    if kind == 3:
        return [*members, (_copy(info, random.choice(_NAMES)), content)]
    if kind == 4:
        deflated = _copy(info)
        deflated.compress_type = random.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        members[at] = deflated, content if random.randrange(3) else b"\0" * 50_000_000
        return members
    if kind == 5:
        link = _copy(info)
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        members[at] = link, b"/etc/passwd"
        return members
    folder = info.filename.rpartition("/")[0]
    name = random.choice(("data/aotinductor/model/x.so", "data/constants/custom_obj_0", "../x", "extra/y"))
    return [*members, (_copy(info, f"{folder.partition('/')[0]}/{name}"), b"\x7fELF" + b"\0" * 60)]


def _lie_about_a_record(random: Random, data: bytes) -> bytes:
    """Overwrite a field of the central directory or of a local header."""
    signature = random.choice((b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"))
    places = [i for i in range(len(data) - 46) if data[i : i + 4] == signature]
    if not places:
        return as_bytes(random, data)
    place = random.choice(places) + random.choice((6, 8, 10, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 38, 42))
    value = random.choice((0, 1, 8, 99, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 10**9))
    made = bytearray(data)
    made[place : place + 4] = struct.pack("<I", value)
    return bytes(made)


def as_pickle(random: Random, data: bytes) -> bytes:
    """Delete, repeat and swap opcodes; replace globals, texts and numbers."""
    try:
        ops = _opcodes(data)
    except Exception:  # pickletools raises whatever it meets
        return as_bytes(random, data)
    for _ in range(random.choice((1, 1, 2))):
        at, other = random.randrange(len(ops)), random.randrange(len(ops))
        kind = random.randrange(6)
        if kind == 0 and len(ops) > 1:
            del ops[at]
        elif kind == 1:
            ops.insert(other, ops[at])
        elif kind == 2:
            ops[at], ops[other] = ops[other], ops[at]
        elif kind == 3:
            module, name = random.choice(_GLOBALS)
            places = [i for i, op in enumerate(ops) if op[:1] == b"c"] or [at]
            ops[random.choice(places)] = f"c{module}\n{name}\n".encode()
        elif kind == 4:
            text = random.choice(WORDS).encode(errors="surrogatepass")
            ops[at] = b"X" + struct.pack("<I", len(text)) + text
        else:
            ops[at] = random.choice(
                (b"R", b"0", b"(", b"t", b"]", b"}", b"N", b"b", b"Q", b"\x85", b"J\xff\xff\xff\x7f",
                 b"\x8a\x09" + b"\xff" * 8 + b"\0", b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"h\xff")
            )  # fmt: skip
    return b"".join(ops)


def _opcodes(data: bytes) -> list[bytes]:
    starts = [place for _, _, place in pickletools.genops(data) if place is not None]
    ends = [*starts[1:], starts[-1] + 1]
    rest = data[ends[-1] :]  # a pickle may be followed by others
    return [data[a:b] for a, b in zip(starts, ends, strict=True)] + ([rest] if rest else [])


def as_safetensors(random: Random, data: bytes) -> bytes:
    """Edit the header as JSON, lie about its length, or change the data."""
    if len(data) < 8:
        return as_bytes(random, data)
    (length,) = struct.unpack("<Q", data[:8])
    header, values = data[8 : 8 + length], data[8 + length :]
    kind = random.randrange(8)
    if kind == 0:
        return as_bytes(random, data)
    if kind == 1:
        lie = random.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1, 10**8))
        return struct.pack("<Q", lie % 2**64) + data[8:]
    if kind == 2:
        return data[: 8 + length] + as_bytes(random, values)
    changed = as_json(random, header)
    return struct.pack("<Q", len(changed)) + changed + values
