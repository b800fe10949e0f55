"""A case: a name, and a function that runs audits or commands and returns their document."""

from __future__ import annotations

import hashlib
import random
import re
import shlex
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ampaudit.audit.scan import scan
from ampaudit.core.errors import AuditError
from ampaudit.render.json import to_json
from tests.support.paths import ROOT
from tests.support.program import run_program
from tools.replay.text import normalized, without_paths

Run = Callable[[Path], str]
Family = Callable[[], Iterator[tuple[str, Run]]]
FAMILIES: list[Family] = []
_TEXTS = {".json", ".yaml", ".txt", ".md", ".html", ".csv", ".xml", ".sarif", ".py"}


@dataclass(frozen=True)
class Case:
    """A name, which is also a relative path, and a function that is run in an empty folder."""

    name: str
    run: Run


@dataclass(frozen=True)
class Outcome:
    """The document of a case, its seconds, and whether it raised an exception that no user should see."""

    name: str
    text: str
    seconds: float
    crashed: bool


def family(cases: Family) -> Family:
    """Register a function that yields cases; its name becomes the prefix of theirs."""
    FAMILIES.append(cases)
    return cases


def run_case(case: Case) -> Outcome:
    """Run a case independently of those before it; its document has no times, versions or paths."""
    started, crashed = time.perf_counter(), False
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            text = case.run(Path(folder))
        except AuditError as error:
            text = f"{type(error).__name__}: {error}\n"
        except Exception as error:
            text, crashed = "".join(traceback.format_exception_only(error)), True
        text = normalized(text, Path(folder))
    return Outcome(case.name, text, time.perf_counter() - started, crashed)


def audit(build: Callable[[], tuple[Any, Any]], **options: Any) -> Run:
    """Return a run that scans a model from Python."""

    def run(_: Path) -> str:
        model, inputs = build()
        return to_json(scan(model, inputs, **options))

    return run


def session(
    *commands: str, prepare: Callable[[Path], object] = lambda folder: None, inside: bool = False
) -> Run:
    """Return a run of commands, one after another; ``{}`` stands for a folder.

    The document has their output, and the files that they write to the folder.

    Args:
        *commands: the arguments of ``ampaudit``, as in a shell.
        prepare: writes files into the folder first.
        inside: run the commands in the folder instead of the checkout.
    """

    def run(folder: Path) -> str:
        prepare(folder)
        before = _files(folder)
        parts = [_transcript(command, folder, folder if inside else ROOT) for command in commands]
        return "".join([*parts, *(_described(path, folder) for path in _files(folder) if path not in before)])

    return run


def _transcript(command: str, folder: Path, current: Path) -> str:
    words = [word.replace("{}", str(folder)) for word in shlex.split(command)]
    done = run_program(*words, cwd=current)
    # progress appears only if a command takes some time
    errors = re.sub(r"(?m)^.* \.\.\.\n", "", done.stderr)
    return f"$ ampaudit {command}\n{done.stdout}\n{errors}exit code {done.returncode}\n"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _described(path: Path, folder: Path) -> str:
    """Return the text of a file, or a digest of its content."""
    head = f"-- {path.relative_to(folder).as_posix()}"
    if path.suffix in _TEXTS:
        return f"{head}\n{path.read_text(encoding='utf-8')}\n"
    return f"{head}: {_digest(path, folder)}\n"


def _digest(path: Path, folder: Path) -> str:
    """Return a digest of the content, without the paths of source files that exported programs contain."""
    if not zipfile.is_zipfile(path):
        return hashlib.sha256(path.read_bytes().replace(str(folder).encode(), b"FOLDER")).hexdigest()
    digest = hashlib.sha256()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith(".json"):
                content = without_paths(content.decode(), folder).encode()
            if not name.endswith("serialization_id"):  # a digest of the others
                digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()
