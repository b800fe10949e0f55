"""All cases, with their names."""

from __future__ import annotations

import re

from tools.replay import commands, documents, models, onnx  # noqa: F401 - they register their families
from tools.replay.case import FAMILIES, Case


def all_cases() -> list[Case]:
    """Return all cases; those of a family come one after another."""
    found = [
        Case(re.sub(r"[^\w./=,-]+", "-", f"{cases.__name__}/{name}"), run)
        for cases in FAMILIES
        for name, run in cases()
    ]
    assert len({case.name for case in found}) == len(found), "two cases have the same name"
    return found
