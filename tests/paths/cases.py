"""Models that the general trace refuses, each with a twin that overflows at a known line."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_FILES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "models").glob("*.py"))
    if path.stem != "__init__"
}
# each model with the policies that it is audited under
AUDITED = [
    (name, policy)
    for name, text in _FILES.items()
    for policy in (("ampaudit",) if "model.half() fails" in text else ("ampaudit", "half"))
]
PLANTED = [name for name, text in _FILES.items() if "def planted(" in text]
# their batches take different paths, with an overflow on each
TWO_PATHS = [name for name, text in _FILES.items() if text.count("# OVERFLOW") > 1]


@cache
def load(name: str) -> ModuleType:
    """Import a model's file."""
    return import_module(f"tests.paths.models.{name}")


def batches_of(module: ModuleType) -> list[Any]:
    """Return the batches of a model's file."""
    return list(module.batches()) if hasattr(module, "batches") else [module.example_inputs()]


def marked_lines(module: ModuleType) -> set[tuple[str, int]]:
    """Return the lines with the comment that says where the twin overflows."""
    path = Path(module.__file__ or "")
    lines = path.read_text(encoding="utf-8").splitlines()
    return {(path.as_posix(), n) for n, line in enumerate(lines, 1) if re.search(r"# OVERFLOW\b", line)}
