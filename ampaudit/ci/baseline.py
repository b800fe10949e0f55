"""The file of ``check --baseline``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ampaudit.core.files import write_text
from ampaudit.core.text import model_file
from ampaudit.core.untrusted import describe_path
from ampaudit.render.json import to_json
from ampaudit.report.baseline import Baseline, KnownTarget
from ampaudit.report.check import TargetResult
from ampaudit.report.saved import read_record

__all__ = ["BaselineFile"]

_HOW = "write one with: ampaudit check TARGETS --baseline FILE --update-baseline"


class BaselineFile:
    """What a file accepts of each target; targets are named by their paths from its directory."""

    def __init__(self, path: Path, *, update: bool) -> None:
        """Read the file.

        Args:
            path: of the file.
            update: whether it will be written, and need not exist yet.

        Raises:
            InputError: it cannot be read, or is no baseline.
        """
        self._path = path
        self._baseline = Baseline()
        if path.exists() or not update:
            name = f"--baseline {describe_path(path)}"
            self._baseline = read_record(Baseline, "baseline", path, name, _HOW)

    def entries(self, target: str) -> tuple[KnownTarget, ...]:
        """Return what is accepted of a target, under any policy."""
        key = self._key(target)
        return tuple(known for known in self._baseline.targets if known.target == key)

    def update(self, results: Iterable[TargetResult]) -> None:
        """Accept what was found, and keep what the file has of other targets, policies and formats.

        Raises:
            OutputError: the file cannot be written.
        """
        found = [replace(r.accepted, target=self._key(r.target)) for r in results if r.accepted is not None]
        if found:
            write_text(self._path, to_json(self._baseline.updated(found)), force=True)

    def _key(self, target: str) -> str:
        """Return a target's path from the directory of the file; an import path stays as it is."""
        file = target if Path(target).exists() else model_file(target)
        if not Path(file).exists():
            return target
        beside = os.path.relpath(Path(file).resolve(), self._path.resolve().parent)
        return f"{beside.replace(os.sep, '/')}{target[len(file) :]}"
