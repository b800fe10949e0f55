"""A temporary folder for each test process alone, in which nothing of ours may be left."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary folder of this process, and of the programs that tests start."""
    cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")  # where torch has it by itself
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("temporary")
        patch.setenv(_CACHE, os.environ.get(_CACHE, str(cache)))
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder
    _check(_ours(folder))  # what fixtures of wider scopes have left


@pytest.fixture(autouse=True)
def nothing_is_left(temporary_folder: Path) -> Iterator[None]:
    """Fail a test that leaves a file of ours in the temporary folder."""
    before = _ours(temporary_folder)
    yield
    _check(_ours(temporary_folder) - before)


def _ours(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*ampaudit*")}


def _check(left: set[str]) -> None:
    assert not left, f"left in the temporary folder: {', '.join(sorted(left))}"
