"""Shortens the path of a source file for display."""

from __future__ import annotations

import os
from pathlib import Path

from ampaudit.core.text import forward_slashes
from ampaudit.report.finding import INSTALLED

__all__ = ["relative_path"]


def relative_path(file: str) -> str:
    """Return the path relative to ``site-packages`` or the working directory, else unchanged."""
    file = forward_slashes(file)
    _, packages, inside = file.rpartition(INSTALLED)
    if packages:
        return inside
    try:
        relative = forward_slashes(os.path.relpath(file, Path.cwd()))
    except ValueError:  # an empty name, or another drive
        return file
    return file if relative.startswith("..") else relative
