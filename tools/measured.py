"""Reads the recordings of ``make measure``: the seconds of each test, and the lines that it executes."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "ampaudit"


def executed(databases: Iterable[Path]) -> Iterator[tuple[str, str, int]]:
    """Yield files of the package with a test, and a number that has a bit for each line the test executes.

    Reads databases of coverage.py. The test is an empty string for lines that an import executes.
    """
    for path in databases:
        with sqlite3.connect(path) as database:
            rows = database.execute(
                "select file.path, context.context, line_bits.numbits from line_bits"
                " join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
            )
            for name, test, bits in rows:
                file = f"{PACKAGE}/{name.rpartition(f'/{PACKAGE}/')[2]}"
                yield file, test, int.from_bytes(bits, "little")


def read_times(files: Iterable[Path]) -> dict[str, float]:
    """Return the processor seconds of each test, with an equal part of the fixtures it shares with others.

    If several files have a test, the last one counts.
    """
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    last = {test: (own, *shared) for test, own, *shared in rows}
    users = Counter(name for _, *shared in last.values() for one in shared for name in one)
    return {
        test: own + sum(cost / users[name] for one in shared for name, cost in one.items())
        for test, (own, *shared) in last.items()
    }
