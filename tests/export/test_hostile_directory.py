"""Converted directories from somebody else: nothing outside is read, nothing that was changed is run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampaudit.checkpoint import MANIFEST
from ampaudit.core.errors import AuditError, WeightsError
from ampaudit.core.untrusted import MAX_MESSAGE
from ampaudit.export import verify as verify_module
from ampaudit.export.manifest import FileRecord, Manifest, read_manifest, write_manifest
from ampaudit.export.restore import restore
from ampaudit.export.verify import verify
from ampaudit.report.conversion import Verification
from tests.support.converted import converted, tied

WEIGHTS, MASTERS, PROGRAM, REFERENCE = (
    "model.safetensors",
    "master.safetensors",
    "model.pt2",
    "reference.safetensors",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tied(), tmp_path_factory.mktemp("original") / "out", policy="half")


@pytest.fixture
def out(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "out"))


def found_in(out: Path) -> Verification:
    return verify(out, run=False)


def forge(out: Path, **changes: Any) -> None:
    """Write another manifest, with the digest that makes it look right."""
    manifest = replace(read_manifest(out), **changes)
    (out / MANIFEST).unlink()
    write_manifest(out, manifest)


@pytest.mark.parametrize("name", [PROGRAM, REFERENCE, WEIGHTS])
@pytest.mark.parametrize("damage", ["changed", "longer", "truncated", "missing", "link"])
def test_what_was_changed_is_not_run(
    out: Path, name: str, damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for attribute in vars(verify_module):
        if attribute.startswith("_in_"):
            monkeypatch.setattr(verify_module, attribute, lambda *_: pytest.fail("it was run"))
    data = (out / name).read_bytes()
    (out / name).unlink()
    if damage == "link":
        (tmp_path / name).write_bytes(data)
        (out / name).symlink_to(tmp_path / name)
    elif damage != "missing":
        changed = {
            "changed": data[:-1] + bytes([data[-1] ^ 1]),
            "longer": data + b"\0",
            "truncated": data[:-1],
        }
        (out / name).write_bytes(changed[damage])
    found = verify(out)
    assert (PROGRAM, "program") in {(p.where, p.kind) for p in found.problems}
    assert any(f"was not run: {name} is " in p.what for p in found.problems)
    assert found.exit_code == 1


def test_a_program_that_the_manifest_does_not_list_is_not_run(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / REFERENCE).rename(out / "kept")
    files = read_manifest(out).files
    forge(out, files={name: record for name, record in files.items() if name != REFERENCE})
    (out / "kept").rename(out / REFERENCE)
    seen = {(p.kind, p.where, p.what) for p in verify(out).problems}
    assert ("program", PROGRAM, f"was not run: {REFERENCE} is not in the manifest") in seen


STRANGE: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file": lambda path, other: path.symlink_to(other),
    "a link to a folder": lambda path, other: path.symlink_to(other.parent),
    "a link to nothing": lambda path, other: path.symlink_to(other.parent / "gone"),
    "a link to itself": lambda path, other: path.symlink_to(path),
    "a link to a device": lambda path, other: path.symlink_to("/dev/zero"),
    "a FIFO": lambda path, other: os.mkfifo(path),
}


@pytest.mark.parametrize("case", STRANGE)
@pytest.mark.parametrize("name", ["extra", "sub/extra", WEIGHTS, PROGRAM, "plan.yaml"])
def test_links_and_special_files_are_problems(out: Path, tmp_path: Path, case: str, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    path = out / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    STRANGE[case](path, tmp_path / "elsewhere" / "secret")
    kinds = {(p.where, p.kind) for p in found_in(out).problems}
    assert (name, "extra" if "extra" in name else "changed") in kinds


def test_a_folder_that_is_a_link_is_not_followed(out: Path, tmp_path: Path) -> None:
    (out / "sub").mkdir()
    (out / "sub" / "notes.txt").write_text("hello")
    forge(out)
    assert "sub/notes.txt" in read_manifest(out).files
    (out / "sub").rename(tmp_path / "sub")
    (out / "sub").symlink_to(tmp_path / "sub")
    kinds = {(p.where, p.kind) for p in found_in(out).problems}
    assert kinds == {("sub/notes.txt", "changed"), ("sub", "extra")}
    with pytest.raises(WeightsError, match="is a link"):
        restore(out, tmp_path / "back", force=False)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", [WEIGHTS, MASTERS])
def test_links_are_not_restored(out: Path, tmp_path: Path, name: str) -> None:
    (out / name).rename(tmp_path / "elsewhere")
    (out / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="a link"):
        restore(out, tmp_path / "back", force=False)
    assert not (tmp_path / "back").exists()


def files_named(*names: str) -> Callable[[Manifest], dict[str, Any]]:
    record = FileRecord("0" * 64, 1)
    return lambda manifest: {"files": manifest.files | dict.fromkeys(names, record)}


def tensors_with(**changes: Any) -> Callable[[Manifest], dict[str, Any]]:
    return lambda manifest: {"tensors": {n: replace(t, **changes) for n, t in manifest.tensors.items()}}


FORGED = {
    **{
        f"the file {name!r}": (files_named(name), "not in the directory|only in case")
        for name in (
            *("../x", "/etc/passwd", "a/../../x", "C:\\x", "C:x", "a\\b", "a//b", "./a", "a/", "", ".", ".."),
            *(MANIFEST, "Manifest.JSON", "MODEL.pt2", "Model.safetensors", "a\0b", "a\nb", "\x1b[31m"),
            *("\u202etxt", "x" * 2000),
        )
    },
    "two hundred thousand files": (files_named(*map(str, range(200_000))), "files: .*at most 100000"),
    "weights elsewhere": (tensors_with(file="../other.safetensors"), "not in the directory"),
    "masters elsewhere": (tensors_with(master="/etc/passwd"), "not in the directory"),
    "an unknown type": (tensors_with(dtype="F7"), "unknown type 'F7'"),
    "an unknown type of masters": (tensors_with(master_dtype="\x1b[31m"), "unknown type"),
    "a negative shape": (tensors_with(shape=(-1,)), "shape"),
    "many dimensions": (tensors_with(shape=(1,) * 1000), "at most 64 items"),
    "another schema": (lambda manifest: {"schema": 2}, "schema"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_forged_manifest_is_refused(out: Path, tmp_path: Path, case: str) -> None:
    change, message = FORGED[case]
    forge(out, **change(read_manifest(out)))
    for use in (found_in, lambda path: restore(path, tmp_path / "back", force=False)):
        with pytest.raises(WeightsError, match=message) as caught:
            use(out)
        assert len(caught.value.args[0]) <= MAX_MESSAGE
        assert caught.value.args[0].isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        *({"dtype": "F32"}, {"dtype": "I64"}, {"shape": (1,)}, {"crc32": 1}, {"master_dtype": "F64"}),
        *({"master": WEIGHTS}, {"file": MASTERS}, {"master_crc32": 5}, {"master_dtype": "F4"}),
    ],
    ids=str,
)
def test_a_manifest_that_contradicts_the_weights_is_no_crash(
    out: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    forge(out, **tensors_with(**changes)(read_manifest(out)))
    found_in(out)
    with contextlib.suppress(AuditError):  # other errors fail; values that are right may be restored
        restore(out, tmp_path / "back", force=False)


def test_two_spellings_of_one_manifest_are_not_the_same(out: Path) -> None:
    """Also what no reader of JSON would notice is a change."""
    text = (out / MANIFEST).read_text()
    for changed in (text.replace('": ', '":  ', 1), text + " ", text.replace("{", '{"other": 1,', 1)):
        (out / MANIFEST).write_text(changed)
        with pytest.raises(WeightsError, match="changed after it was written"):
            read_manifest(out)


def test_every_flipped_bit_is_named(out: Path) -> None:
    chance = random.Random(0)
    files = sorted(path for path in out.iterdir() if path.is_file())
    for path in files:
        data = path.read_bytes()
        for _ in range(200 // len(files)):
            place = chance.randrange(len(data))
            path.write_bytes(
                data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
            )
            if path.name == MANIFEST:
                with pytest.raises(WeightsError, match=r"manifest\.json"):
                    found_in(out)
            else:
                assert any(p.where == path.name for p in found_in(out).problems)
        path.write_bytes(data)
    assert found_in(out).problems == ()
