"""Names the modes without importing torch, so that a wrong name is reported at once."""

from __future__ import annotations

from collections.abc import Iterable

from ampaudit.core.config import split_commas
from ampaudit.core.errors import UsageError, did_you_mean

__all__ = ["DEFAULT_MODES", "MODES", "parse_modes"]

MODES = ("fp32", "tf32", "autocast", "half", "bf16", "converted", "converted+compile")
DEFAULT_MODES = MODES[:-1]


def parse_modes(given: str | Iterable[str]) -> tuple[str, ...]:
    """Parse names such as ``fp32,autocast``; duplicates are dropped.

    Raises:
        UsageError: one is no mode.
    """
    names = tuple(dict.fromkeys(split_commas(given)))
    for name in names:
        if name not in MODES:
            hint = f"{did_you_mean(name, MODES)}one of: {', '.join(MODES)}"
            raise UsageError(f"--modes {name}: no such mode", hint=hint)
    if not names:
        raise UsageError("--modes names none", hint=f"some of: {', '.join(MODES)}")
    return names
