"""Signals: one line, the right exit code, and nothing left behind, wherever they arrive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ampaudit.findings.pages import all_pages
from tests.support.signals import end_by_signal

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at processes in /proc")

Cli = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[[str], Path]

MODEL = """
def get_model():
    return nn.Linear(8, 8).eval()

def example_inputs():
    return torch.ones(2, 8)
"""
COMMANDS = {
    "explain": "explain AMP106",
    "scan": "scan model.py -o report.json",
    "convert": "convert model.py -o out",
    "check": "check model.py -o check.xml",
    "lint": "lint . --fix",
}


@pytest.mark.parametrize("after", [0.0, 0.05, 0.4, 1.5])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_at_some_moment(tmp_path: Path, model_file: Write, command: str, after: float) -> None:
    place = model_file(MODEL).parent
    number = signal.SIGTERM if after == 0.4 else signal.SIGINT
    ended = end_by_signal(COMMANDS[command].split(), place, tmp_path / "tmp", number, after)
    assert not ended.faults(), ended


# each ends the program by itself, at a moment when an exception alone does not
MOMENTS = {
    "dropped in a destructor": (
        """
        class Dropping:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)
        value = Dropping()
        del value
        time.sleep(30)
        """,
        signal.SIGINT,
    ),
    "swallowed by the model's code": (
        """
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            time.sleep(30)
        """,
        signal.SIGINT,
    ),
    "turned into another error": (
        """
        try:
            signal.raise_signal(signal.SIGHUP)
        except BaseException as error:
            raise ValueError("something else") from error
        """,
        signal.SIGHUP,
    ),
    "twice": (
        """
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(30)
        """,
        signal.SIGTERM,
    ),
    "at the end": (
        """
        import atexit
        atexit.register(signal.raise_signal, signal.SIGINT)
        """,
        signal.SIGINT,
    ),
    "while a child runs": (
        """
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        signal.raise_signal(signal.SIGTERM)
        """,
        signal.SIGTERM,
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_that_an_exception_does_not_carry(tmp_path: Path, model_file: Write, moment: str) -> None:
    body, number = MOMENTS[moment]
    code = "import signal, sys, time\n" + textwrap.dedent(body) + MODEL
    path = model_file(code)
    ended = end_by_signal(["scan", path.name], path.parent, tmp_path / "tmp", None, 60)
    assert ended.code == 128 + number
    assert ended.stderr.endswith(f"{ended.word(number)}; nothing was written\n")
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert not ended.children
    assert not ended.temporary
    assert ended.seconds < 30


def test_what_was_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(all_pages()["AMP803"].bad.code)
    code = """
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        import ampaudit.core.files as files
        sys.argv = ["ampaudit", "lint", "--fix", "a.py"]
        swap = files.Path.replace
        def replace(path, target):
            signal.raise_signal(signal.SIGINT)  # in the middle of putting the result into place
            return swap(path, target)
        files.Path.replace = replace
        from ampaudit.cli.main import run
        run()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr == "ampaudit: interrupted; a.py was written\n"
    assert "scaler.step(optimizer)" in (tmp_path / "a.py").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


def test_nothing_is_put_into_place_after_a_signal(tmp_path: Path, model_file: Write) -> None:
    """A conversion went on and ended with 0 if a destructor dropped the exception."""
    code = MODEL + textwrap.dedent("""
        class Dropping(nn.Linear):
            def __del__(self):
                import signal
                signal.raise_signal(signal.SIGINT)

        def get_model():
            Dropping(8, 8)
            return nn.Linear(8, 8).eval()
    """)
    path = model_file(code)
    ended = end_by_signal(["convert", path.name, "-o", "out"], path.parent, tmp_path / "tmp", None, 60)
    assert ended.code == 130
    assert not ended.new
    assert ended.stderr.endswith("interrupted; nothing was written\n")


def test_an_ignored_signal_stays_ignored(model_file: Write, cli: Cli) -> None:
    """As under nohup, or in the background of a shell."""
    path = model_file("import signal\nsignal.raise_signal(signal.SIGHUP)\n" + MODEL)
    done = subprocess.run(
        [sys.executable, "-m", "ampaudit", "scan", str(path), "-q"],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [
        (">&-", 2, "cannot write to standard output: Bad file descriptor"),
        ("> /dev/full", 2, "cannot write to standard output: No space left on device"),
        ("2>&-", 0, ""),
        ("2> /dev/full", 0, ""),
        ("<&-", 0, ""),
        ("<&- >&- 2>&-", 2, ""),
    ],
)
def test_streams_that_are_closed_or_full(redirection: str, code: int, words: str) -> None:
    command = f"{sys.executable} -m ampaudit explain AMP106 {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_standard_input_is_told_as_that() -> None:
    closed = f"{sys.executable} -m ampaudit lint - <&-"
    done = subprocess.run(["sh", "-c", closed], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot read standard input: Bad file descriptor" in done.stderr


@pytest.mark.parametrize("home", ["", "/nonexistent", "/dev/null"])
def test_without_a_home(home: str, model_file: Write) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "TMPDIR")}
    done = subprocess.run(
        [sys.executable, "-m", "ampaudit", "scan", str(model_file(MODEL)), "-q"],
        env=environment | ({"HOME": home} if home else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
