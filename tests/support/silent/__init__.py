"""Models whose outputs are finite and wrong in 16 bits, each with a repaired twin.

The line that is to be named ends in ``# culprit``.
"""

from __future__ import annotations

from tests.support.silent import accumulation, cancellation, positions, routing
from tests.support.silent.case import CASES, Silent, culprit_lines

__all__ = ["CASES", "Silent", "accumulation", "cancellation", "culprit_lines", "positions", "routing"]
