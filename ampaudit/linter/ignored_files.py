"""Tells which files git ignores, by the ``.gitignore`` files of a repository."""

from __future__ import annotations

import os
from pathlib import Path

from pathspec import GitIgnoreSpec

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import read_bounded

__all__ = ["IgnoredFiles"]

_MAX_BYTES = 1 << 20


class IgnoredFiles:
    """The ``.gitignore`` files of the directories around a path, the innermost of which decides.

    Args:
        directory: where the search for files begins. Files of directories above it count up to the one
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
                found = spec.check_file(f"{inside}/" if is_directory else inside)
                if found.include is not None:
                    return found.include
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
