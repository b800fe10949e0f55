"""Captures rich output as plain text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["as_text"]


def as_text(printed: Callable[[Console], None], width: int, *, terminal: bool = False) -> str:
    """Return printed output as text without colors and trailing blanks.

    Args:
        printed: Function that prints to a console.
        width: Width in characters at which lines wrap.
        terminal: Whether tables must fit that width as well, instead of being as wide as their content.
    """
    from rich.console import Console

    stream = io.StringIO()
    printed(Console(file=stream, width=width, highlight=False, color_system=None, force_terminal=terminal))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().split("\n")[:-1])
