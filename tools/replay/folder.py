"""Writes documents to a folder, and compares documents with those recorded there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tools.replay.text import difference

_SUFFIX = ".txt"


def record(folder: Path, documents: Mapping[str, str], only: str = "") -> None:
    """Write the documents, and delete earlier ones whose name matches ``only``."""
    for name in _recorded(folder, only):
        _path(folder, name).unlink()
    for name, text in documents.items():
        path = _path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")


def compare(folder: Path, documents: Mapping[str, str], only: str = "") -> bool:
    """Print how the documents differ from the recorded ones; return whether all are the same."""
    recorded = {name: _read(_path(folder, name)) for name in _recorded(folder, only)}
    missing, new = sorted(recorded.keys() - documents), sorted(documents.keys() - recorded)
    different = sorted(name for name in recorded.keys() & documents if recorded[name] != documents[name])
    for name in different:
        print(difference(name, recorded[name], documents[name]))
    for title, names in (("missing", missing), ("new", new), ("different", different)):
        for name in names:
            print(f"{title}: {name}")
    equal = len(documents) - len(new) - len(different)
    print(f"{equal} equal, {len(different)} different, {len(missing)} missing, {len(new)} new")
    return not (missing or new or different)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}{_SUFFIX}"


def _recorded(folder: Path, only: str) -> list[str]:
    paths = sorted(folder.rglob(f"*{_SUFFIX}"))
    names = [path.relative_to(folder).as_posix().removesuffix(_SUFFIX) for path in paths]
    return [name for name in names if re.search(only, name)]


def _read(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="surrogatepass")
