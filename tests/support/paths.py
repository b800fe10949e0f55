"""Places in the repository that tests read."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DATA", "GOLDEN", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
GOLDEN = ROOT / "tests" / "golden"
