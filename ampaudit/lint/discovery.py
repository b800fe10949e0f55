"""Which files are meant by paths, directories and globs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ["find"]

_SUFFIXES = (".py", ".pyi", ".ipynb", ".md", ".markdown")
_SKIPPED = frozenset(
    "__pycache__ node_modules site-packages venv env build dist _build __pypackages__".split()
)


def find(paths: Sequence[str], exclude: Sequence[str] = ()) -> Iterator[Path]:
    """Every file once, in order; links to directories are not followed.

    A path that is named itself is taken whatever its suffix; one that does not exist is handed on, so that
    reading it says so.

    Args:
        paths: files, directories and globs.
        exclude: globs over paths, or over single names in them.
    """
    seen: set[str] = set()
    for text in paths:
        for path in _expanded(text):
            if path.is_dir():
                candidates: Iterator[Path] | list[Path] = _inside(path, exclude)
            else:
                candidates = [path]
            for candidate in candidates:
                real = os.path.realpath(candidate)
                if real not in seen and not _matches(candidate, exclude):
                    seen.add(real)
                    yield candidate


def _expanded(text: str) -> list[Path]:
    path = Path(text)
    if os.path.lexists(path) or not set("*?[") & set(text):
        return [path]
    parts = path.parts
    first = next(i for i, part in enumerate(parts) if set("*?[") & set(part))
    base = Path(*parts[:first])
    # unlike glob.glob, this does not follow links to directories, but finds what is hidden
    found = sorted(base.glob(str(Path(*parts[first:]))))
    return [p for p in found if not any(q.startswith(".") for q in p.relative_to(base).parts)] or [path]


def _inside(directory: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for place, directories, names in os.walk(directory):
        directories[:] = sorted(
            name
            for name in directories
            if name not in _SKIPPED and not name.startswith(".") and not _matches(Path(place) / name, exclude)
        )
        for name in sorted(names):
            if name.endswith(_SUFFIXES):
                yield Path(place) / name


def _matches(path: Path, exclude: Sequence[str]) -> bool:
    text = path.as_posix()
    return any(
        fnmatchcase(text, pattern) or fnmatchcase(text, f"*/{pattern}") or pattern.rstrip("/") in path.parts
        for pattern in exclude
    )
