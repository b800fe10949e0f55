"""What differs on Windows and macOS, as far as another system can show it."""

from __future__ import annotations

import ntpath
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from ampaudit.core import confinement, files, text
from ampaudit.core.child import ChildProcess, child_environment
from ampaudit.core.text import model_file
from ampaudit.findings.finding import Source
from ampaudit.render import sarif
from ampaudit.render.findings import relative_path
from ampaudit.trace import stack
from tests.support.paths import ROOT

TRACE = r"""
  File "C:\work\train.py", line 3, in main
    model(x)
  File "C:\venv\Lib\site-packages\transformers\models\t5.py", line 7, in forward
    return x + self.wo(x)
  File "C:\venv\Lib\site-packages\torch\nn\modules\linear.py", line 9, in forward
    return F.linear(x)
"""


@pytest.fixture
def backslashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_SEPARATOR", "\\")


@pytest.mark.usefixtures("backslashes")
def test_lines_of_a_model_are_found_in_paths_of_windows() -> None:
    innermost, caller = stack.source_lines(TRACE)
    assert innermost is not None
    assert caller is not None
    assert (innermost.file, innermost.line) == ("C:/venv/Lib/site-packages/transformers/models/t5.py", 7)
    assert (caller.file, caller.line) == ("C:/work/train.py", 3)
    assert Source(innermost.file, innermost.line, caller=caller).user_line == caller
    assert (
        relative_path(r"C:\venv\Lib\site-packages\transformers\models\t5.py") == "transformers/models/t5.py"
    )


@pytest.mark.usefixtures("backslashes")
def test_addresses_of_drives() -> None:
    assert sarif._artifact(r"C:\my work\m.py") == {"uri": "file:///C:/my%20work/m.py"}
    assert sarif._artifact("/elsewhere/m.py") == {"uri": "file:///elsewhere/m.py"}
    assert sarif._artifact(r"models\m.py") == {"uri": "models/m.py", "uriBaseId": "%SRCROOT%"}


@pytest.mark.parametrize(
    ("location", "file"),
    [
        (r"C:\models\m.py", r"C:\models\m.py"),
        (r"C:\models\m.py:build", r"C:\models\m.py"),
        ("models/m.py:build", "models/m.py"),
        ("package.module:build", "package.module"),
        ("m.py", "m.py"),
        ("", ""),
    ],
)
def test_the_colon_of_a_drive_is_no_factory(location: str, file: str) -> None:
    assert model_file(location) == file


def test_the_null_device_has_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(confinement.os, "path", ntpath)
        null, other = confinement._normalized("nul"), confinement._normalized("NUL")
        inside = confinement._normalized(r"C:\Temp\Scratch\file")
    assert null == other
    assert inside == r"c:\temp\scratch\file"


@pytest.mark.parametrize("directories", [True, False])
def test_a_staging_directory_is_removed_when_its_writer_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directories: bool
) -> None:
    if directories and os.name == "nt":
        pytest.skip("Windows opens no directories")
    monkeypatch.setattr(files, "_LOCKS_DIRECTORIES", directories)
    dead, alive = tmp_path / ".out.part-dead.tmp", tmp_path / ".out.part-alive.tmp"
    for place in (dead, alive):
        place.mkdir()
    release = files.locked(alive)
    assert release is not None
    with files.staged_directory(tmp_path / "out", force=False, marker="ours.json") as stage:
        assert files.locked(stage) is None, "another writer cannot take it"
        (stage / "ours.json").write_text("{}")
    assert not dead.exists()
    assert alive.exists()
    release()
    with files.staged_directory(tmp_path / "out", force=True, marker="ours.json") as stage:
        (stage / "ours.json").write_text("[]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert (tmp_path / "out" / "ours.json").read_text() == "[]"


def test_a_lock_of_another_process_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOCKS_DIRECTORIES", False)
    place = tmp_path / ".out.part-rival"
    place.mkdir()
    with FileLock(f"{place}.lock"):
        assert files.locked(place) is None
    assert files.locked(place) is not None


GRANDCHILD = """
import subprocess, sys, time


def main():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_children_of_children_are_killed_without_process_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy_module.py").write_text(GRANDCHILD)
    log = tmp_path / "log"
    environment = {**child_environment(), "PYTHONPATH": str(tmp_path)}
    child = ChildProcess("busy_module:main", log=log, environment=environment)
    end = time.monotonic() + 60
    while not log.read_text().strip() and time.monotonic() < end:
        time.sleep(0.05)
    grandchild = psutil.Process(int(log.read_text()))
    monkeypatch.delattr(os, "killpg", raising=False)
    child.stop()
    _, left = psutil.wait_procs([grandchild], timeout=30)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


# what Python has on Linux alone, or on Linux and macOS
ABSENT = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "posix1e")
WITHOUT = """
import os, signal, sys
{first}
for name in {absent!r}:
    sys.modules[name] = None
for name in ("killpg", "register_at_fork", "mkfifo", "O_NONBLOCK", "O_CLOEXEC", "fork", "getuid", "geteuid"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGXCPU"):
    if hasattr(signal, name):
        delattr(signal, name)
sys.argv = ["ampaudit", *sys.argv[1:]]
from ampaudit.cli.main import run
run()
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("lint", "examples/lint/finetune.py"), 1, "AMP8"),
        (("rules", "show", "torch-cuda"), 0, "torch-cuda/matmul"),
        (("scan", "examples/t5_feed_forward.py", "--policy", "torch-cuda"), 1, "AMP101"),
    ],
)
def test_commands_run_without_what_windows_lacks(words: tuple[str, ...], code: int, said: str) -> None:
    # they choose by the name of the system what they use
    first = "import psutil, torch._inductor.async_compile" if words[0] == "scan" else ""
    script = WITHOUT.format(absent=ABSENT, first=first)
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    made = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, env=environment, timeout=120
    )
    assert made.returncode == code, made.stderr.decode("cp1252")[-2000:]
    assert said in made.stdout.decode("cp1252")
