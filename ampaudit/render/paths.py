"""How the path of a source file is shown."""

from __future__ import annotations

import os
from pathlib import Path

from ampaudit.report.finding import INSTALLED

__all__ = ["relative_path"]


def relative_path(file: str) -> str:
    """Below the working directory, or from the package's directory on, or as it is."""
    _, packages, inside = file.rpartition(INSTALLED)
    if packages:
        return inside
    relative = os.path.relpath(file, Path.cwd())
    return file if relative.startswith("..") else relative
