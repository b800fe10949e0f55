"""Zip archives: what torch writes is read as zipfile reads it, and nothing that is not quite that."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ampaudit.checkpoint.archive import Archive, _zip64
from ampaudit.core.errors import SourceError, WeightsError
from ampaudit.core.untrusted import MAX_MESSAGE

MEMBERS = {"r/data.pkl": b"pickled", "r/byteorder": b"little", "r/data/0": b"12345678", "r/data/1": b""}


def zipped(members: dict[str, bytes], **fields: object) -> bytes:
    """An archive; ``fields`` are of the last member's entry."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            for field, value in fields.items() if name == list(members)[-1] else ():
                setattr(info, field, value)
            archive.writestr(info, data)
    return stream.getvalue()


def saved(state: object, **options: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream, **options)
    return stream.getvalue()


def opened(path: Path, data: bytes) -> Archive:
    path = path / "x.pt"
    path.write_bytes(data)
    return Archive(path, WeightsError)


def contents(archive: Archive) -> list[bytes]:
    return [archive.read(name, 10**6) for name in archive.members]


def refused(path: Path, data: bytes) -> str:
    with pytest.raises(WeightsError) as caught:
        contents(opened(path, data))
    message = str(caught.value.args[0])
    assert len(message) <= MAX_MESSAGE
    assert message.isprintable()
    return message


@pytest.mark.parametrize("checksums", [True, False])
def test_members_are_those_that_zipfile_reads(tmp_path: Path, checksums: bool) -> None:
    state = {str(index): torch.randn(index, 7) for index in range(20)}
    torch.serialization.set_crc32_options(checksums)
    try:
        data = saved(state)
    finally:
        torch.serialization.set_crc32_options(True)
    archive = opened(tmp_path, data)
    reference = zipfile.ZipFile(io.BytesIO(data))
    assert [f"archive/{name}" for name in archive.members] == reference.namelist()
    for info in reference.infolist():
        name = info.filename.removeprefix("archive/")
        assert archive.members[name].size == info.file_size
        assert archive.mapped(name) == archive.read(name, info.file_size)
        if checksums:
            assert archive.read(name, info.file_size) == reference.read(info)


def test_what_is_written_to_a_mapping_stays_in_memory(tmp_path: Path) -> None:
    data = zipped(MEMBERS)
    archive = opened(tmp_path, data)
    archive.mapped("data/0")[:4] = b"____"
    assert archive.mapped("data/0") == b"____5678"
    assert (tmp_path / "x.pt").read_bytes() == data


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "C:/x", "../x", "r/../x", "r/..", "r/./x", "r//x", "r/", "r"),
        *("r\\x/y", "r/a\\..\\b", "r/a\0b", "q/other-folder", "r/data.pkl"),
    ],
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    raw = name.encode()
    data = zipped({"r/data.pkl": b"", "y" * len(raw): b""})
    # zipfile itself would clean the name
    assert "not an archive of torch" in refused(tmp_path, data.replace(b"y" * len(raw), raw))


def test_links_and_devices_are_refused(tmp_path: Path) -> None:
    for mode in (0o120777, 0o060666, 0o020666, 0o010666, 0o040755):
        data = zipped(MEMBERS, external_attr=mode << 16)
        assert "not a regular file" in refused(tmp_path, data)
    assert opened(tmp_path, zipped(MEMBERS, external_attr=0o100644 << 16)).read("data/1", 0) == b""


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    data = zipped({"r/data.pkl": bytes(10**6)}, compress_type=zipfile.ZIP_DEFLATED)
    assert "data.pkl is compressed" in refused(tmp_path, data)
    assert "compressed" in refused(tmp_path, saved_program())


def saved_program() -> bytes:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), stream)
    return stream.getvalue()


def test_a_changed_member_is_named(tmp_path: Path) -> None:
    data = zipped(MEMBERS).replace(b"12345678", b"12345679")
    assert "the checksum of data/0 differs" in refused(tmp_path, data)


def test_another_byte_order_is_refused(tmp_path: Path) -> None:
    assert "byte order" in refused(tmp_path, zipped(MEMBERS | {"r/byteorder": b"big"}))


def test_limits_and_missing_members(tmp_path: Path) -> None:
    archive = opened(tmp_path, zipped(MEMBERS))
    with pytest.raises(WeightsError, match="has 8 bytes; 7 are allowed"):
        archive.read("data/0", 7)
    with pytest.raises(WeightsError, match="it has no data/9"):
        archive.mapped("data/9")
    with pytest.raises(SourceError, match="not an archive"):
        Archive(Path(__file__), SourceError)


ONE = zipped({"r/data.pkl": b"pickled", "r/data/0": b"12345678"})
DIRECTORY = ONE.index(b"PK\x01\x02")
SECOND = ONE.index(b"PK\x01\x02", DIRECTORY + 4)
END = ONE.index(b"PK\x05\x06")


def patched(place: int, form: str, *values: int) -> bytes:
    data = bytearray(ONE)
    struct.pack_into(form, data, place, *values)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"PK", ONE[:-1], ONE[1:], ONE + b"x", b"x" + ONE, ONE[: len(ONE) // 2]),
        patched(SECOND + 42, "<I", 0),  # two members in one place
        patched(SECOND + 42, "<I", 10**9),
        patched(SECOND + 20, "<2I", 10**9, 10**9),
        patched(SECOND + 20, "<2I", 7, 7),  # sizes that differ from the member's own header
        patched(SECOND + 24, "<I", 9),
        patched(SECOND + 20, "<2I", 0xFFFFFFFF, 0xFFFFFFFF),  # a zip64 field that is not there
        patched(SECOND + 8, "<H", 1),  # encrypted
        patched(SECOND + 10, "<H", 99),  # another method
        patched(SECOND + 28, "<H", 60_000),  # a name beyond the end
        patched(SECOND + 30, "<H", 60_000),
        patched(26, "<H", 9),  # names that differ
        patched(END + 8, "<2H", 1, 1),
        patched(END + 8, "<2H", 3, 3),
        patched(END + 8, "<2H", 0xFFFF, 0xFFFF),
        patched(END + 16, "<I", 0),
        patched(END + 12, "<I", 0),
        patched(END + 4, "<H", 1),
    ],
)
def test_archives_that_readers_disagree_about_are_refused(tmp_path: Path, data: bytes) -> None:
    assert data != ONE
    refused(tmp_path, data)


TORCH = saved({"a": torch.arange(5), "b": torch.ones(2).half()})


@given(st.integers(0, len(TORCH) - 1), st.integers(1, 255))
@example(TORCH.index(b"PK\x06\x06") + 4, 1)
def test_a_flipped_byte_is_refused_or_changes_no_member(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    """Also those of the records by which large archives are found."""
    data = bytearray(TORCH)
    data[place] ^= change
    folder = tmp_path_factory.getbasetemp()
    before = contents(opened(folder, TORCH))
    try:
        after = contents(opened(folder, bytes(data)))
    except WeightsError:
        return
    assert after == before


def test_a_size_is_not_looked_for_among_thousands_of_fields() -> None:
    wide = struct.pack("<HHQ", 1, 8, 7)
    assert _zip64(b"\5\0\0\0" * 3 + wide, 0xFFFFFFFF, 7, 0) == (7, 7, 0)
    with pytest.raises(struct.error):
        _zip64(b"\5\0\0\0" * 16_000 + wide, 0xFFFFFFFF, 7, 0)
