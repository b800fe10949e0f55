"""Finds the shipped rule files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ampaudit.core.errors import PolicyError

__all__ = ["policy_names", "rules_directory"]


@cache
def rules_directory() -> Path:
    """Return the directory of the shipped rule files, in the wheel or beside the package.

    Raises:
        PolicyError: the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "_rules", package.parent / "rules"):
        if (candidate / "torch-cuda.yaml").is_file():
            return candidate
    raise PolicyError("the shipped rule files are missing", hint="install ampaudit again")


def policy_names() -> list[str]:
    """Return the names of the shipped policies, sorted."""
    return sorted(path.stem for path in rules_directory().glob("*.yaml"))
