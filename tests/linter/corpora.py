"""Scripts to lint that others wrote, in sets: ``tests/data/lint/README.md`` says where each comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.paths import DATA

_FOLDER = DATA / "lint"
_MARK = "# <- here"
SETS = sorted(path.stem for path in _FOLDER.glob("*.jsonl"))


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, and what the linter says about it.

    Attributes:
        name: within its set.
        codes: of the errors and warnings at or next to a marked line; in a correct script, there are none.
        missed: why none is at a marked line.
        source: its text.
    """

    name: str
    codes: list[str] = field(default_factory=list)
    missed: str | None = None
    source: str = field(repr=False)

    @property
    def marked(self) -> list[int]:
        """The lines where a linter should speak, from 1; a correct script has none."""
        lines = self.source.split("\n")
        return [number for number, line in enumerate(lines, 1) if line.rstrip().endswith(_MARK)]


def _path(name: str) -> Path:
    return _FOLDER / f"{name}.jsonl"


def read_set(name: str) -> list[Script]:
    with _path(name).open(encoding="utf-8") as lines:
        return [Script(**json.loads(line)) for line in lines]


def write_set(name: str, scripts: Iterable[Script]) -> None:
    text = "".join(json.dumps(asdict(script)) + "\n" for script in scripts)
    _path(name).write_text(text, encoding="utf-8", newline="\n")
