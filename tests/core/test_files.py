"""Outputs are the whole old ones or the whole new ones: full and read-only disks, kills, links, rivals."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ampaudit.core import files
from ampaudit.core.errors import OutputError
from ampaudit.core.files import (
    check_directory,
    staged_directory,
    temporary_directory,
    write_private,
    write_text,
)

OURS = "manifest.json"


def fill(path: Path, text: str, *, force: bool = True) -> None:
    with staged_directory(path, force=force, marker=OURS) as stage:
        (stage / OURS).write_text(text)
        (stage / "deep").mkdir()
        (stage / "deep" / "file").write_text(text)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_a_directory_is_written_and_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one", force=False)
    with pytest.raises(OutputError, match="exists"):
        fill(out, "two", force=False)
    assert (out / "deep" / "file").read_text() == "one"
    fill(out, "two")
    assert (out / "deep" / "file").read_text() == "two"
    assert names(tmp_path) == ["out"]


def test_what_we_did_not_write_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years")
    with pytest.raises(OutputError, match="not written by ampaudit"):
        fill(out, "new")
    assert (out / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize("force", [False, True])
def test_a_pipe_is_written_to_and_stays(tmp_path: Path, force: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, tmp_path / "link"):
        write_text(path, "text", force=force)
        assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(os.devnull)
    write_text(tmp_path / "link", "text", force=True)
    assert Path(os.devnull).is_char_device()
    assert (tmp_path / "link").is_symlink()


def test_a_socket_is_not_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        with pytest.raises(OutputError, match="a device or a socket"):
            write_text(tmp_path / "socket", "text", force=True)
        assert (tmp_path / "socket").is_socket()


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "one", force=False)
    assert names(tmp_path / "out") == ["deep", OURS]


@pytest.mark.parametrize("kind", ["link", "dangling", "file", "orphan"])
def test_places_that_cannot_be_a_directory(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        out.symlink_to(tmp_path / "elsewhere")
    elif kind == "dangling":
        out.symlink_to(tmp_path / "nowhere")
    elif kind == "file":
        out.write_text("a file")
    else:
        out = tmp_path / "no" / "such" / "parent"
    before = names(tmp_path)
    with pytest.raises(OutputError) as caught:
        fill(out, "new")
    assert caught.value.hint
    assert names(tmp_path) == before


@pytest.mark.parametrize("name", ["half.onnx", "half.safetensors", "half.pt"])
def test_a_directory_is_not_named_like_a_file_of_weights(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match=r"looks like a file") as raised:
        check_directory(tmp_path / name, force=True, marker=OURS)
    assert raised.value.hint == "-o takes a directory, such as half"
    check_directory(tmp_path / "half.v2", force=True, marker=OURS)


def test_a_failure_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one")
    with pytest.raises(ZeroDivisionError):
        fail(out, ZeroDivisionError())
    assert (out / OURS).read_text() == "one"
    assert names(tmp_path) == ["out"]


def write_while_a_rival_does(out: Path) -> None:
    with staged_directory(out, force=False, marker=OURS) as stage:
        (stage / OURS).write_text("late")
        fill(out, "rival", force=False)


def test_what_a_rival_wrote_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="exists") as caught:
        write_while_a_rival_does(out)
    assert (out / OURS).read_text() == "rival"
    (kept,) = (path for path in tmp_path.iterdir() if path != out)
    assert (kept / OURS).read_text() == "late"
    assert caught.value.__notes__ == [f"the result is kept in {kept}"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one")
    with pytest.raises(OutputError, match="No space left on device; nothing was changed") as caught:
        fail(out, OSError(errno.ENOSPC, "No space left on device"))
    assert caught.value.hint == "free some space"
    assert (out / OURS).read_text() == "one"
    assert names(tmp_path) == ["out"]


def fail(out: Path, error: Exception) -> None:
    with staged_directory(out, force=True, marker=OURS) as stage:
        (stage / OURS).write_text("half")
        raise error


def test_a_read_only_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(OutputError, match="Read-only file system; nothing was changed"):
        fill(tmp_path / "out", "new")


KILLED = """
    import sys, time
    from pathlib import Path
    from ampaudit.core.files import staged_directory, write_text
    with staged_directory(Path(sys.argv[1]), force=True, marker="manifest.json") as stage:
        (stage / "manifest.json").write_text("half")
        print("ready", flush=True)
        time.sleep(60)
"""


def test_a_kill_half_way_leaves_the_old_one_and_the_next_tidies_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        assert len(names(tmp_path)) == 2
        fill(out, "two")  # a rival that lives keeps its directory
        assert len(names(tmp_path)) == 2
        writer.send_signal(signal.SIGKILL)
    assert (out / OURS).read_text() == "two"
    time.sleep(0.1)
    fill(out, "three")
    assert names(tmp_path) == ["out"]
    assert (out / OURS).read_text() == "three"


def test_without_exchange_two_renames_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampaudit.core.files._exchange", lambda first, second: False)
    out = tmp_path / "out"
    fill(out, "one")
    fill(out, "two")
    assert (out / OURS).read_text() == "two"
    assert names(tmp_path) == ["out"]


HOLDS = """
    import sys, time
    from pathlib import Path
    from ampaudit.core.files import file_beside, temporary_directory
    {code}
        (path / "weights" if path.is_dir() else path).write_text("half")
        print("ready", flush=True)
        time.sleep(60)
"""
DIRECTORY = "with temporary_directory('ampaudit-sandbox-') as path:"
FILE = "with file_beside(Path('report.json')) as path:"


def holder(place: Path, code: str) -> subprocess.Popen[str]:
    """Start a process that has something temporary, and wait until it has."""
    command = [sys.executable, "-c", textwrap.dedent(HOLDS).format(code=code)]
    environment = {**os.environ, "TMPDIR": str(place)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_directory_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = holder(tmp_path, DIRECTORY)
    (left,) = names(tmp_path)
    alive = holder(tmp_path, DIRECTORY)
    (kept,) = set(names(tmp_path)) - {left}
    kill(dead)
    assert names(tmp_path) == sorted((left, kept))
    with temporary_directory("ampaudit-check-") as own:
        assert names(tmp_path) == sorted((kept, own.name)), "what a dead process left goes, and nothing else"
    assert (tmp_path / kept / "weights").read_text() == "half"
    kill(alive)
    with temporary_directory("ampaudit-check-"):
        pass
    assert names(tmp_path) == []


def test_a_process_removes_what_its_killed_child_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_directory("ampaudit-check-"):
        kill(holder(tmp_path, DIRECTORY))
        assert len(names(tmp_path)) == 2
    assert names(tmp_path) == []


def test_a_file_of_a_killed_writer_is_removed_by_the_next(tmp_path: Path) -> None:
    writer = holder(tmp_path, FILE)
    write_text(tmp_path / "report.json", "a rival's", force=False)
    assert len(names(tmp_path)) == 2
    kill(writer)
    write_text(tmp_path / "other.json", "of another name", force=False)
    assert len(names(tmp_path)) == 3
    write_text(tmp_path / "report.json", "whole", force=True)
    assert names(tmp_path) == ["other.json", "report.json"]


def test_what_is_not_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    for made in (elsewhere, place / "ampaudit-results", place / "other-1a2b3c4d.tmp"):
        made.mkdir(parents=True)
    (elsewhere / "thesis.txt").write_text("years")
    (place / "ampaudit-link-1a2b3c4d.tmp").symlink_to(elsewhere)
    (place / "ampaudit-scan-1a2b3c4d.json").write_text("a result that was kept")
    os.mkfifo(place / "ampaudit-pipe-1a2b3c4d.tmp")
    before = names(place)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with temporary_directory("ampaudit-check-"):
        pass
    assert names(place) == before
    assert names(elsewhere) == ["thesis.txt"]


def test_a_directory_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "ampaudit-sandbox-1a2b3c4d.tmp"
    theirs.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
        with temporary_directory("ampaudit-check-"):
            pass
    assert theirs.exists()
    with temporary_directory("ampaudit-check-"):
        pass
    assert names(tmp_path) == []


def test_a_rival_that_removes_a_directory_before_it_is_locked_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, seen = files.locked, list[Path]()

    def late(path: Path) -> Callable[[], None] | None:
        seen.append(path)
        if len(seen) == 1:
            path.rmdir()
        release = lock(path)
        if len(seen) == 2:
            path.rmdir()
        return release

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "locked", late)
    with temporary_directory("ampaudit-check-") as directory:
        assert directory == seen[2]
        assert directory.is_dir()
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_listed_holds_temporary_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "listdir", refused)
    with temporary_directory("ampaudit-check-") as directory:
        assert directory.is_dir()


def test_a_private_file_replaces_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years")
    (tmp_path / "kept.json").symlink_to(tmp_path / "precious")
    write_private(tmp_path / "kept.json", "a result")
    assert (tmp_path / "precious").read_text() == "years"
    assert (tmp_path / "kept.json").read_text() == "a result"
    assert (tmp_path / "kept.json").lstat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["kept.json", "precious"]
