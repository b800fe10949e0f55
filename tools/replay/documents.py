"""Saved documents of each kind in each format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from ampaudit.render.render import as_file, formats_of
from tests.support.saved import NAMES, SAMPLES, sample
from tools.replay.case import Run, family, session


@family
def rendered() -> Iterator[tuple[str, Run]]:
    for kind in SAMPLES:
        for form in formats_of(kind):
            yield f"{kind}-{form}", partial(_rendered, kind, form)


@family
def shown() -> Iterator[tuple[str, Run]]:
    """Saved reports on terminals of two widths, and how they differ."""
    for name in NAMES:
        words = [f"report tests/data/reports/{name}.json {option}" for option in ("", "-q", "-v")]
        yield name, session(*words)
    scans = ("overflow", "policies", "gradients", "static", "ranges")
    for old, new in product(scans, scans):
        words = f"diff tests/data/reports/{old}.json tests/data/reports/{new}.json"
        yield f"diff-{old}-{new}", session(f"{words} -v", f"{words} --format json")


def _rendered(kind: str, form: str, _: Path) -> str:
    return as_file(sample(kind), form)
