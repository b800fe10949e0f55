"""What tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.parallel import written
from tests.support.program import Program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the model."""
    written(tmp_path)
    return tmp_path


@pytest.fixture
def ranks() -> Iterator[list[Program]]:
    """Take processes, and end those that still run."""
    found: list[Program] = []
    yield found
    for process in found:
        process.close()
