"""Names the modes, without torch, so that a mistake in a name is reported at once."""

from __future__ import annotations

from ampaudit.core.errors import UsageError, did_you_mean

__all__ = ["MODES", "parse_modes"]

MODES = ("fp32", "tf32", "autocast", "half", "bf16", "converted", "converted+compile")


def parse_modes(text: str) -> tuple[str, ...]:
    """Parse names from ``fp32,autocast``.

    Raises:
        UsageError: one is no mode.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in MODES:
            hint = f"{did_you_mean(name, MODES)}one of: {', '.join(MODES)}"
            raise UsageError(f"--modes {name}: no such mode", hint=hint)
    if not names:
        raise UsageError("--modes names none", hint=f"some of: {', '.join(MODES)}")
    return names
