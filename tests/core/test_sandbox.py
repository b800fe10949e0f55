"""The sandbox: what confined code cannot do, and what is said when it tries."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ampaudit.core.errors import CouldNotAudit, SourceError
from ampaudit.core.sandbox import Sandbox, SandboxLimits
from tests.support.paths import ROOT

LIMITS = SandboxLimits(60, memory=200_000_000, processor_seconds=2)
linux = pytest.mark.skipif(sys.platform != "linux", reason="holds on Linux only")


def asked(name: str, request: Any = None, limits: SandboxLimits = LIMITS) -> Any:
    target = f"tests.support.sandboxed:{name}"
    with Sandbox(target, request, limits, {"PYTHONPATH": str(ROOT)}) as sandbox:
        return sandbox.answer("x.bin", SourceError, "give up")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing is left behind, whatever happened."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert not list(place.iterdir())


def test_an_answer_comes_back() -> None:
    request = {"a": [1, 2.5, None, "é\u202e"]}
    assert asked("echo", request) == request


def test_the_environment_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "https_proxy", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "secret")
    variables, folder, typed = asked("environment")
    assert "secret" not in variables.values()
    assert (variables["HF_HUB_OFFLINE"], variables["TRANSFORMERS_OFFLINE"]) == ("1", "1")
    assert folder == variables["TMPDIR"]
    assert Path(folder).name == "scratch"
    assert typed == ""


@linux
def test_native_code_writes_connects_and_starts_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    done = asked("native", str(victim))
    assert {name for name, worked in done.items() if worked} == {"create inside"}
    assert [p.name for p in tmp_path.iterdir() if p.name != "tmp"] == ["victim"]
    assert victim.read_text() == "untouched"


def test_python_code_writes_nothing_outside(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    assert not any(asked("python", str(victim)).values())
    assert [p.name for p in tmp_path.iterdir() if p.name != "tmp"] == ["victim"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("connects", "reading it would open a connection"),
        ("asks", "reading it would ask on standard input"),
        ("starts", "reading it would start a program"),
        ("crashes", "could not be read: its process was killed by SIGSEGV"),
        ("exits", "could not be read: its process ended with exit code 3"),
        ("answers_much", "its reader gave no valid answer"),
        ("prints", "OSError: .*too large"),
    ],
)
def test_what_it_tries_is_said(name: str, what: str) -> None:
    with pytest.raises(SourceError, match=f"^x.bin: {what}") as caught:
        asked(name)
    assert caught.value.hint == "give up"


@linux
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("allocates", "takes too much memory"),
        ("spins", "takes more than 2 s"),
        ("opens_files", "Too many open files"),
    ],
)
def test_what_it_uses_is_limited(name: str, what: str) -> None:
    started = time.perf_counter()
    with pytest.raises(SourceError, match=what):
        asked(name)
    assert time.perf_counter() - started < 20


def test_time_is_limited_without_work() -> None:
    with pytest.raises(SourceError, match="its reader was stopped after 2 s"):
        asked("sleeps", limits=SandboxLimits(2))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"answer": 1, "more": 2}', '{"error": 1}', "[" * 10**6]
)
def test_an_answer_is_not_believed(text: str) -> None:
    with pytest.raises(SourceError, match="no valid answer"):
        asked("answers_garbage", text)


def test_messages_are_short_and_printable() -> None:
    with pytest.raises(SourceError) as caught:
        asked("raises", "\x1b[31m::error::\u202e" + "x" * 5000)
    message = str(caught.value.args[0])
    assert len(message) <= 300
    assert message.isprintable()


@linux
def test_processes_that_it_leaves_are_killed() -> None:
    left = asked("leaves_a_process")
    time.sleep(0.2)
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CouldNotAudit, match=r"cannot start a sandbox in .*: No space left on device"):
        asked("echo")
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(CouldNotAudit, match="cannot start a sandbox"):
        asked("echo")


@linux
def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, tempfile, time\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from ampaudit.core.sandbox import Sandbox, SandboxLimits\n"
        "box = Sandbox('tests.support.sandboxed:sleeps', None, SandboxLimits(60))\n"
        "print(box._process._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(1)
        assert child.is_running()
        parent.kill()
    child.wait(10)
