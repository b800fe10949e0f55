"""Finds the files that paths, directories and globs name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pathspec import GitIgnoreSpec

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import read_bounded

__all__ = ["find_files", "leaves_tree", "matches"]

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
            ignored = IgnoredFiles(path) if gitignore and os.path.isdir(path) else None
            candidates: Iterable[Path] = _walk(path, exclude, ignored) if os.path.isdir(path) else [path]
            for candidate in candidates:
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


def _walk(directory: Path, exclude: Sequence[str], ignored: IgnoredFiles | None) -> Iterator[Path]:
    unreadable: list[OSError] = []
    for parent, directories, names in os.walk(directory, onerror=unreadable.append):
        directories[:] = sorted(
            name
            for name in directories
            if name not in _SKIPPED_DIRECTORIES
            and not name.startswith(".")
            and not matches(Path(parent) / name, exclude)
            and not (ignored and ignored.covers(Path(parent) / name, is_directory=True))
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


class IgnoredFiles:
    """The ``.gitignore`` files of the directories around a path, the innermost of which decides.

    Args:
        directory: Directory in which the search begins. Files of its parents count up to the one
            that holds ``.git``.
    """

    def __init__(self, directory: Path) -> None:
        self._specs: dict[str, GitIgnoreSpec | None] = {}
        self._root = os.path.realpath(directory)
        above = self._root
        while not os.path.exists(os.path.join(above, ".git")) and (up := os.path.dirname(above)) != above:
            above = up
        if os.path.exists(os.path.join(above, ".git")):
            self._root = above

    def covers(self, path: Path, *, is_directory: bool = False) -> bool:
        """Return whether git ignores a path that is in no ignored directory."""
        name = os.path.join(os.path.realpath(path.parent), path.name)
        directory = os.path.dirname(name)
        while directory.startswith(self._root):
            spec = self._spec(directory)
            if spec is not None:
                inside = os.path.relpath(name, directory).replace(os.sep, "/")
                check = spec.check_file(f"{inside}/" if is_directory else inside)
                if check.include is not None:
                    return check.include
            if directory == self._root:
                break
            directory = os.path.dirname(directory)
        return False

    def _spec(self, directory: str) -> GitIgnoreSpec | None:
        if directory not in self._specs:
            self._specs[directory] = _read(Path(directory, ".gitignore"))
        return self._specs[directory]


def _read(path: Path) -> GitIgnoreSpec | None:
    if not path.is_file():
        return None
    try:
        return GitIgnoreSpec.from_lines(read_bounded(path, _MAX_BYTES, InputError).decode().splitlines())
    except (InputError, ValueError):  # git reads none of it either
        return None
