"""What a terminal shows: a live bar, ASCII where it has no more, no colour where none is wanted."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import ampaudit.cli.progress as progress_module
from ampaudit.cli.progress import ProgressBar
from ampaudit.cli.terminal import _ASCII, _HANDLER, make_printable
from ampaudit.render.terminal import as_text
from tests.support.paths import ROOT
from tests.support.saved import PLACE

Cli = Callable[..., subprocess.CompletedProcess[str]]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


def on_a_terminal(*arguments: object, cwd: Path | None = None, **environment: str) -> str:
    """Run the program with a terminal on all three streams; what it wrote."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ampaudit", *map(str, arguments)],
        stdin=follower, stdout=follower, stderr=follower, close_fds=True, cwd=cwd,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    )  # fmt: skip
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(leader)
    process.wait(timeout=60)
    return written.decode(errors="backslashreplace")


def test_colour_on_a_terminal_and_none_with_no_color() -> None:
    path = PLACE / "overflow.json"
    assert COLOUR.search(on_a_terminal("report", path))
    assert not COLOUR.search(on_a_terminal("report", path, NO_COLOR="1"))


def test_no_escape_and_no_trailing_blank_in_a_pipe(cli: Cli) -> None:
    text = cli("report", PLACE / "training.json", COLUMNS="80").stdout
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 80
    wide = cli("report", PLACE / "training.json", COLUMNS="200").stdout
    assert 80 < max(map(len, wide.splitlines())) <= 200


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("name", ["training", "check", "overflow"])
def test_letters_that_a_terminal_lacks_are_replaced(name: str, encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ampaudit", "report", str(PLACE / f"{name}.json")],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80"},
        check=True,
    )
    text = done.stdout.decode(encoding)
    assert "\\u" not in text
    if name == "training":
        assert "fp32       #***" in text


def test_other_letters_become_escapes(tmp_path: Path) -> None:
    text = (PLACE / "overflow.json").read_text(encoding="utf-8").replace("blocks.1.wo", "blöcke.漢🙂")
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ampaudit", "report", str(tmp_path / "r.json")],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert b"bl\\xf6cke.\\u6f22\\U0001f642" in done.stdout


def test_every_mark_of_ours_has_an_ascii_form() -> None:
    make_printable()
    for mark, plain in _ASCII.items():
        assert mark.encode("ascii", _HANDLER).decode() == plain
    assert b"half of \xc3".decode("utf-8", _HANDLER) == "half of \ufffd"
    modules = sorted((ROOT / "ampaudit" / "render").rglob("*.py"))
    printed = "".join(path.read_text(encoding="utf-8") for path in modules)
    strings = re.findall(r'"[^"\n]*"', printed)
    marks = {letter for text in strings for letter in text if ord(letter) > 127}
    assert marks <= _ASCII.keys()


def test_the_bar_is_drawn_and_wiped(model_file: Callable[..., Path]) -> None:
    slow = model_file(
        "import time\n"
        "def get_model():\n    return nn.Linear(8, 8)\n"
        "def batches():\n"
        "    for _ in range(6):\n        time.sleep(0.7)\n        yield torch.ones(2, 8)\n"
        "def example_inputs():\n    return torch.ones(2, 8)\n",
        "slow [bold]model.py",
    )
    text = on_a_terminal("scan", slow.name, "--batches", "6", "-q", cwd=slow.parent)
    assert "loading" in text
    assert "[bold]model.py" in text  # a name is not markup
    assert "\x1b[2K" in text  # the line is wiped
    assert text.rstrip().splitlines()[-1].endswith("(top)/cast")


class Recorder:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> None:
        self.lines.append(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_a_log_gets_lines_and_a_short_run_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(sys, "stderr", recorder)
    with ProgressBar("model.py") as progress:
        progress.update("auditing", 0, 3)
    assert recorder.lines == []
    monkeypatch.setattr("ampaudit.cli.progress.PATIENCE_SECONDS", 0.01)
    with ProgressBar("evil\x1b[31m.py") as progress:
        shown = threading.Event()
        while not recorder.lines and not shown.wait(0.01):
            pass
        progress.update("auditing", 0, 3)
        progress.update("auditing", 1, 3)
        progress.update("trying", 0, 2)
    assert recorder.lines == [
        "loading evil\\x1b[31m.py ...\n",
        "auditing evil\\x1b[31m.py: batch 1 of 3 ...\n",
        "trying: 1 of 2 ...\n",
    ]
    progress.update("auditing", 2, 3)  # after its end it is silent
    assert len(recorder.lines) == 3


class Clock:
    """A terminal whose bar is drawn at moments that the test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.stream = 0.0, io.StringIO()
        monkeypatch.setattr(self.stream, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stderr", self.stream)
        monkeypatch.setattr("ampaudit.cli.progress.PATIENCE_SECONDS", 1000)
        console = Console(file=self.stream, force_terminal=True, width=100, _environ={})
        make = progress_module.make_bar
        bar = partial(make, console=console, get_time=lambda: self.now, auto_refresh=False)
        monkeypatch.setattr(progress_module, "make_bar", bar)


def drawn(progress: ProgressBar) -> str:
    """The bar as it is now."""
    bar = progress._bar
    assert bar is not None
    bar.columns[-2]._renderable_cache.clear()  # it is computed twice a second at most
    return as_text(lambda console: console.print(bar.get_renderable()), 100)


def test_a_terminal_shows_the_time_left_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with ProgressBar("model.py") as progress:
        progress._show()
        assert "left" not in drawn(progress)  # nothing is known while the model is loaded
        progress.update("auditing", 0, 5)
        clock.now += 60  # a step takes longer than rich looks back by default
        progress.update("auditing", 1, 5)
        assert "1/5 0:01:00 04:00 left" in drawn(progress)
        clock.now += 60
        progress.update("auditing", 2, 5)
        assert "2/5 0:02:00 03:00 left" in drawn(progress)
        progress.update("stressing one", 0, 3)  # the speed of the last phase says nothing about this one
        assert "0/3 0:00:00 --:-- left" in drawn(progress)
        clock.now += 7
        progress.update("stressing another", 1, 3)
        assert "stressing another: " in drawn(progress)
        assert "1/3 0:00:07 00:14 left" in drawn(progress)
        progress.update("exporting", 0, 0)
        assert "left" not in drawn(progress)
        assert "exporting:" in drawn(progress)


@pytest.mark.parametrize("columns", ["0", "000", "-1", "abc", "", " ", "1", "5", "²", "9" * 10, "9" * 5000])
def test_a_width_that_is_none_hides_nothing(cli: Cli, columns: str) -> None:
    usual = cli("explain", "AMP106")
    done = cli("explain", "AMP106", COLUMNS=columns, LINES=columns)
    assert done.returncode == 0, done.stderr
    assert "".join(done.stdout.split()) == "".join(usual.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 1000


def test_a_diff_is_exact_in_a_pipe_and_escaped_on_a_terminal(cli: Cli, tmp_path: Path) -> None:
    code = (ROOT / "examples" / "lint" / "finetune.py").read_text()
    (tmp_path / "train.py").write_text(code.replace("backward()", "backward()  # \f \x1b[31mred"))
    piped = cli("lint", "--diff", "train.py", cwd=tmp_path).stdout
    assert "backward()  # \f \x1b[31mred\n" in piped
    shown = on_a_terminal("lint", "--diff", "train.py", cwd=tmp_path)
    assert r"backward()  # \x0c \x1b[31mred" in shown
    assert "\f" not in shown
