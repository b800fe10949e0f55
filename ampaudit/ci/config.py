"""``[tool.ampaudit]`` in a project's pyproject.toml."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ampaudit.core.errors import UsageError
from ampaudit.core.pyproject import LEVEL, TEXTS, Key, checked, read_table

__all__ = ["parse_size", "read_config"]

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def read_config(path: Path) -> dict[str, Any]:
    """The table's values, by option name with underscores; empty without the table.

    Paths in it are taken from the file's own directory.

    Raises:
        UsageError: not TOML, or a key or value that ``ampaudit check`` does not know.
    """
    values = read_table(path, "tool", "ampaudit")
    values.pop("lint", None)  # a table of its own, for ampaudit lint
    found = checked(path, "tool.ampaudit", values, _KEYS)
    for name in ("baseline", "inputs", "weights"):
        if name in found:
            found[name] = str(path.parent / found[name])
    if "targets" in found:
        found["targets"] = [place for target in found["targets"] for place in _places(path, target)]
    return found


def _places(path: Path, target: str) -> list[str]:
    """A target from the file's directory, or all that match if it is a glob; an import path stays as it is.

    Raises:
        UsageError: a glob matches nothing.
    """
    if not set("*?[") & set(target):
        return [_beside(path, target)]
    matches = sorted(str(place) for place in path.parent.glob(target))
    if not matches:
        raise UsageError(f"{path}: targets: nothing matches {target!r}", hint="correct the pattern")
    return matches


def _beside(path: Path, target: str) -> str:
    beside = path.parent / target
    is_path = beside.exists() or (path.parent / target.rpartition(":")[0]).is_file()
    return str(beside) if is_path else target


def parse_size(text: str) -> int:
    """Bytes of ``4GB``, ``500 MB`` or ``2GiB``.

    Raises:
        UsageError: it is no size.
    """
    compact = text.strip().lower().replace(" ", "")
    digits = compact.rstrip("kmgib")
    try:
        return int(float(digits) * _UNITS[compact[len(digits) :]])
    except (ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"{text!r} is no size", hint="write 4GB, 500MB or 2GiB") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_NUMBER: Key = (_is_number, "a number")
_COUNT: Key = (_is_count, "a whole number")
_MANY: Key = (lambda v: _is_count(v) and v > 0, "a whole number above 0")
_TEXT: Key = (_is_text, "a text")
_KEYS: dict[str, Key] = {
    "targets": TEXTS,
    "policy": _TEXT,
    "dtype": _TEXT,
    "device": _TEXT,
    "fail-on": LEVEL,
    "allow": TEXTS,
    "ignore": TEXTS,
    "min-headroom": _NUMBER,
    "min-sqnr": _NUMBER,
    "max-metric-drop": _NUMBER,
    "max-fp32-share": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "baseline": _TEXT,
    "weights": _TEXT,
    "inputs": _TEXT,
    "batches": _MANY,
    "seed": _COUNT,
    "jobs": _MANY,
    "timeout": (_is_positive, "a number above 0"),
    "max-memory": _TEXT,
}
