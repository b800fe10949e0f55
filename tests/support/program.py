"""Runs the program in this process, or in one forked from a server that has imported what it needs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import torch

from ampaudit.cli.program import run_command
from ampaudit.core.forkserver import start_forked
from ampaudit.core.interrupts import INTERRUPTED
from tests.support.paths import ROOT

_IMPORTS = ("torch.export", "torch.distributed", "ampaudit.ci.worker", "ampaudit.cli.program")
_INSTALLED = (sys.prefix, sys.base_prefix, str(ROOT))


class Program:
    """The program in a process of its own, with the part of ``subprocess.Popen`` that tests use.

    It has imported torch and more before it starts: tests of imports need ``subprocess`` itself.
    """

    def __init__(self, *arguments: object, cwd: Path, environment: Mapping[str, str] | None = None) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed by ``close``)
        variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        with open(os.devnull, "rb") as null:
            self._process = start_forked(
                "ampaudit.cli.main:run",
                *map(str, arguments),
                imports=_IMPORTS,
                environment=variables,
                variables=environment or {},
                streams=[null, *self._files],
                folder=cwd,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what it has printed."""
        self.wait(timeout)
        return _text(self._files[0]), _text(self._files[1])

    def close(self) -> None:
        """Kill the process if it still runs, and close the files of its output."""
        self.kill()
        self.wait()
        for file in self._files:
            file.close()


def run_program(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return what a process of its own would: exit code, output and errors."""
    words = ["ampaudit", *map(str, arguments)]
    with _streams() as (out, err):
        with _process_state(words, cwd, environment or {}):
            code = _run()
        return subprocess.CompletedProcess(words, code, _text(out), _text(err))


def _run() -> int:
    try:
        return run_command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):
                stream.flush()


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    text = stream.read().decode("utf-8", errors="backslashreplace")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as subprocess reads text


@contextlib.contextmanager
def _streams() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Replace the standard streams by files, since they must have descriptors."""
    before = sys.stdin, sys.stdout, sys.stderr
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as null:
        sys.stdin = null
        sys.stdout = open(out.fileno(), "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(err.fileno(), "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        try:
            yield out, err
        finally:
            sys.stdin, sys.stdout, sys.stderr = before


@contextlib.contextmanager
def _process_state(words: list[str], cwd: Path | None, environment: Mapping[str, str]) -> Iterator[None]:
    """Set what a process has of its own, and restore it."""
    folder, variables, path, argv = os.getcwd(), dict(os.environ), sys.path[:], sys.argv
    modules, temporary, threads = set(sys.modules), tempfile.tempdir, torch.get_num_threads()
    dtype, random = torch.get_default_dtype(), torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)  # as Python does by itself
            sys.argv = words
            os.environ.pop("PYTEST_CURRENT_TEST", None)
            os.environ.update(environment)
            if "TMPDIR" in environment:
                tempfile.tempdir = None
            os.chdir(cwd or folder)
            yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:], sys.argv, tempfile.tempdir = path, argv, temporary
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(random)
        for name in set(sys.modules) - modules:  # of the models that were audited
            spec = getattr(sys.modules[name], "__spec__", None)
            places = getattr(spec, "submodule_search_locations", None) or ()  # a namespace has no origin
            place = getattr(spec, "origin", None) or next(iter(places), "")
            if os.path.isabs(place) and not place.startswith(_INSTALLED):
                del sys.modules[name]
