"""Finds the files that paths, directories and globs name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from pathspec import GitIgnoreSpec

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import read_bounded

_MAX_BYTES = 1 << 20
_SUFFIXES = (".py", ".pyi", ".ipynb", ".md", ".markdown")
_SKIPPED_DIRECTORIES = frozenset(
    "__pycache__ node_modules site-packages venv env build dist _build __pypackages__".split()
)


def find_files(
    paths: Sequence[str], exclude: Sequence[str] = (), *, gitignore: bool = False
) -> Iterator[Path]:
    """Yield every file once, in order, without following links to directories.

    A file that is named itself is yielded whatever its suffix; so are a path that does not exist and a
    directory that cannot be listed, which reading them will report.

    Args:
        paths: Files, directories and globs.
        exclude: Globs that match whole paths or single components of them.
        gitignore: Whether to skip what git ignores below directories.
    """
    visited: set[str] = set()
    for text in paths:
        for path in _expand(text):
            for candidate in _walk(path, exclude, gitignore) if os.path.isdir(path) else [path]:
                real = os.path.realpath(candidate)
                if real not in visited and not matches(candidate, exclude):
                    visited.add(real)
                    yield candidate


def _expand(text: str) -> list[Path]:
    path = Path(text)
    if os.path.lexists(path) or not set("*?[") & set(text):
        return [path]
    parts = path.parts
    first = next(i for i, part in enumerate(parts) if set("*?[") & set(part))
    base = Path(*parts[:first])
    # unlike glob.glob, this does not follow links to directories, but matches hidden files
    matches = sorted(base.glob(str(Path(*parts[first:]))))
    return [p for p in matches if not any(q.startswith(".") for q in p.relative_to(base).parts)] or [path]


def leaves_tree(path: Path, paths: Sequence[str]) -> bool:
    """Return whether a file is outside of the given directories, so that a link led to it."""
    if str(path) in {str(Path(text)) for text in paths}:
        return False  # the user named it
    real = Path(os.path.realpath(path))
    return not any(real.is_relative_to(os.path.realpath(_base_of(text))) for text in paths)


def _base_of(text: str) -> Path:
    """Return the directory in which a path, or a glob, is searched."""
    path = Path(text)
    while not os.path.isdir(path):
        path = path.parent
    return path


def _walk(directory: Path, exclude: Sequence[str], gitignore: bool) -> Iterator[Path]:
    ignored = _IgnoredFiles(directory) if gitignore else None
    unreadable: list[OSError] = []
    for parent, directories, names in os.walk(directory, onerror=unreadable.append):
        directories[:] = sorted(
            name
            for name in directories
            if name not in _SKIPPED_DIRECTORIES
            and not name.startswith(".")
            and not matches(Path(parent) / name, exclude)
            and not (ignored and ignored.covers(Path(parent) / name))
        )
        files = (Path(parent) / name for name in sorted(names) if name.endswith(_SUFFIXES))
        yield from (path for path in files if not (ignored and ignored.covers(path)))
    yield from (Path(error.filename) for error in unreadable)


def matches(path: Path, globs: Sequence[str]) -> bool:
    """Return whether a glob matches a whole path, the end of one, or a single component."""
    text = path.as_posix()
    return any(
        fnmatchcase(text, pattern) or fnmatchcase(text, f"*/{pattern}") or pattern.rstrip("/") in path.parts
        for pattern in globs
    )


class _IgnoredFiles:
    """The ``.gitignore`` files below and above a directory, up to the one that holds ``.git``."""

    def __init__(self, directory: Path) -> None:
        start = Path(os.path.realpath(directory))
        self._root = next((d for d in (start, *start.parents) if (d / ".git").exists()), start)
        self._spec = cache(_read_gitignore)

    def covers(self, path: Path) -> bool:
        """Return whether git ignores a path that is in no ignored directory: the innermost file decides."""
        path = Path(os.path.realpath(path.parent), path.name)
        is_directory = path.is_dir() and not path.is_symlink()
        for directory in path.parents:
            inside = path.relative_to(directory).as_posix() + "/" * is_directory
            is_ignored = self._spec(directory).check_file(inside).include
            if is_ignored is not None or directory == self._root:
                return bool(is_ignored)
        return False


def _read_gitignore(directory: Path) -> GitIgnoreSpec:
    path = directory / ".gitignore"
    try:
        lines = read_bounded(path, _MAX_BYTES, InputError).decode().splitlines() if path.is_file() else []
        return GitIgnoreSpec.from_lines(lines)
    except (InputError, ValueError):  # git reads none of it either
        return GitIgnoreSpec.from_lines([])
