"""Every benchmark runs: the least that it can, with what it starts run in this process."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing.dummy import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import PARTS
from tests.support.cli import parsed
from tests.support.paths import ROOT
from tests.support.program import run_program

SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
NOT_HERE = {"onnx_peers": "onnx_conversion starts it", "gpu": "needs CUDA; its commands are read below"}


class TaskHere:
    """In place of a fresh process: its start runs the task to its end."""

    def __init__(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
        self.start = partial(target, *args)

    def join(self) -> None:
        return

    kill = join


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run programs that import torch here, and the tasks of fresh processes."""
    run, threads = subprocess.run, torch.get_num_threads()

    def run_here(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        if words[1:3] != ["-m", "ampaudit"]:
            return run(words, **options)
        done = run_program(*words[3:], cwd=options.get("cwd"))
        assert done.returncode == 0 or not options.get("check"), done.stderr
        return done

    def measured(command: list[str]) -> tuple[float, float]:
        started = time.perf_counter()
        if command[1:3] == ["-m", "benchmarks.segments"]:
            with pytest.raises(SystemExit) as ended:
                import_module("benchmarks.segments").main(command[3:])
            assert ended.value.code == 0
        elif command[1] == "-c":
            exec(command[2], {})
        else:
            run_here(command, check=True)
        return time.perf_counter() - started, 1.0

    own = multiprocessing.get_context
    here = SimpleNamespace(Pipe=Pipe, Process=TaskHere, set_forkserver_preload=lambda _: None)
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr("benchmarks.checkpoints.run", measured)
    monkeypatch.setattr("benchmarks.segments.run", measured)
    monkeypatch.setattr(multiprocessing, "Pipe", Pipe)
    monkeypatch.setattr(multiprocessing, "get_context", lambda how: own(how) if how == "fork" else here)
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", lambda count, _: ThreadPoolExecutor(count))
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.filterwarnings("ignore")  # which are only printed when a script is run by itself
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NOT_HERE])
def test_it_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = import_module(f"benchmarks.{name}")
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    figures = tmp_path / "figures.json"
    script.main(["--smoke", "--json", str(figures)])
    assert capsys.readouterr().out
    if name == "architectures":
        assert all(row["code"] in (0, 1) for row in json.loads(figures.read_text())["rows"])


class ParsedError(Exception):
    """Raised in place of the run that would follow."""


def gpu_commands() -> list[list[str]]:
    """The words of every command that is run on a GPU, with its places filled in."""
    return [
        [word.format(json="result.json", folder="folder") for word in command]
        for part in PARTS.values()
        for command in part.commands
    ]


@pytest.mark.parametrize("words", gpu_commands(), ids=lambda words: "-".join(words[:4]).replace("/", "."))
def test_a_command_for_gpus_is_valid(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
        parse(parser, arguments)
        raise ParsedError

    monkeypatch.chdir(ROOT)
    match words:
        case ["-m", "ampaudit", command, *rest]:
            parsed(command, rest)
        case ["-m", "pytest", *rest]:
            assert rest[:2] == ["-m", "gpu"]
            assert all(Path(word).is_file() for word in rest if word.startswith("tests/"))
        case ["-m", module, *rest]:
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
            with pytest.raises(ParsedError):
                import_module(module).main(rest)
        case [script]:
            assert Path(script).is_file()
        case _:
            raise AssertionError(words)
