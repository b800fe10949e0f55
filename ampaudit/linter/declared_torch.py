"""Finds which versions of torch a project allows, from its pyproject.toml, setup.cfg and requirements.txt."""

from __future__ import annotations

import configparser
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import read_bounded

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = ["UNDECLARED", "DeclaredTorch", "declared_torch"]

_MAX_BYTES: Final = 1_000_000
# the first torch with wheels for a Python, and the last one, from the files of its releases
_FIRST_TORCH: Final = {"3.11": "1.13", "3.12": "2.2", "3.13": "2.5", "3.14": "2.9"}
_LAST_TORCH: Final = {"3.6": "1.10", "3.7": "1.13", "3.8": "2.4"}


@dataclass(frozen=True, slots=True)
class DeclaredTorch:
    """The versions of torch that a project allows.

    Attributes:
        oldest: Lowest allowed version; empty without a lower bound.
        newest: Upper bound, inclusive or exclusive; empty without one.
        file: File that declares the bounds.
    """

    oldest: str = ""
    newest: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"torch {self.oldest}" if self.oldest else f"torch before {self.newest}"

    def is_at_least(self, version: str) -> bool | None:
        """Return whether all allowed versions are at least this one; ``None`` if nothing says so."""
        if self.oldest:
            return _parts(self.oldest) >= _parts(version)
        return False if self.newest and _parts(self.newest) <= _parts(version) else None


UNDECLARED: Final = DeclaredTorch()


@lru_cache(maxsize=4096)
def declared_torch(directory: Path) -> DeclaredTorch:
    """Return the versions of torch that the project around a directory allows.

    Files that cannot be read or parsed declare nothing. The search ends where a repository begins.
    """
    for name, requirements in _READERS.items():
        declared = _declared(list(requirements(directory / name)), name)
        if declared != UNDECLARED:
            return declared
    if (directory / ".git").exists() or directory.parent == directory:
        return UNDECLARED
    return declared_torch(directory.parent)


def _declared(requirements: list[str], file: str) -> DeclaredTorch:
    """Return the versions of torch that requirements such as ``torch>=2.1`` or ``python>=3.8`` allow."""
    from packaging.requirements import InvalidRequirement, Requirement

    by_torch = by_python = UNDECLARED
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        low, high = _bounds(requirement.specifier)
        if requirement.name.lower() == "torch" and (low or high):
            by_torch = DeclaredTorch(low, high, file)
        elif requirement.name == "python" and low:
            last = [torch for python, torch in _LAST_TORCH.items() if _parts(python) >= _parts(low)[:2]]
            first = [torch for python, torch in _FIRST_TORCH.items() if _parts(python) == _parts(low)[:2]]
            by_python = DeclaredTorch(next(iter(last + first), ""), "", file) if last + first else UNDECLARED
    return by_python if by_torch == UNDECLARED else by_torch


def _bounds(specifiers: SpecifierSet) -> tuple[str, str]:
    """Return the least and the greatest version that specifiers name; empty without."""
    low = [s.version for s in specifiers if s.operator in (">=", ">", "==", "===", "~=")]
    high = [s.version for s in specifiers if s.operator in ("<", "<=")]
    return max(low, key=_parts, default=""), min(high, key=_parts, default="")


def _parts(version: str) -> tuple[int, ...]:
    """Return the first numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _text(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_BYTES, InputError).decode("utf-8")
    except (InputError, UnicodeDecodeError):
        return ""


def _pyproject(path: Path) -> Iterator[str]:
    try:
        project: Any = tomllib.loads(_text(path)).get("project", {})
    except (tomllib.TOMLDecodeError, RecursionError):
        return
    if not isinstance(project, dict):
        return
    if isinstance(python := project.get("requires-python"), str):
        yield f"python{python}"
    extras = project.get("optional-dependencies", {})
    groups = [project.get("dependencies", []), *(extras.values() if isinstance(extras, dict) else ())]
    for group in groups:
        yield from (item for item in group if isinstance(item, str)) if isinstance(group, list) else ()


def _setup(path: Path) -> Iterator[str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(_text(path))
    except configparser.Error:
        return
    if python := parser.get("options", "python_requires", fallback=""):
        yield f"python{python}"
    yield from parser.get("options", "install_requires", fallback="").splitlines()


def _requirements(path: Path) -> Iterator[str]:
    yield from (line.partition("#")[0].strip() for line in _text(path).splitlines())


_READERS: Final = {
    "pyproject.toml": _pyproject,
    "setup.cfg": _setup,
    "requirements.txt": _requirements,
}
