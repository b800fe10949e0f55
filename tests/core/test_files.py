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
from pathlib import Path

import pytest

from ampaudit.core.errors import OutputError
from ampaudit.core.files import staged_directory, write_text

OURS = "manifest.json"


def fill(path: Path, text: str, *, force: bool = True) -> None:
    with staged_directory(path, force=force, ours=OURS) as stage:
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


def test_a_failure_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one")
    with pytest.raises(ZeroDivisionError):
        fail(out, ZeroDivisionError())
    assert (out / OURS).read_text() == "one"
    assert names(tmp_path) == ["out"]


def write_while_a_rival_does(out: Path) -> None:
    with staged_directory(out, force=False, ours=OURS) as stage:
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
    with staged_directory(out, force=True, ours=OURS) as stage:
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
    with staged_directory(Path(sys.argv[1]), force=True, ours="manifest.json") as stage:
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
    monkeypatch.setattr("ampaudit.core.files._exchanged", lambda first, second: False)
    out = tmp_path / "out"
    fill(out, "one")
    fill(out, "two")
    assert (out / OURS).read_text() == "two"
    assert names(tmp_path) == ["out"]
