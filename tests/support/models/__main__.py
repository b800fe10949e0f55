"""Recall (right layer, right cause) and false alarms, per policy and format.

Run with ``python -m tests.support.models``.
"""

from __future__ import annotations

import sys

from tests.support.models.score import score, table

if __name__ == "__main__":
    scores = score(verbose="-v" in sys.argv)
    print(table(scores))
    sys.exit(0 if all(s.found == s.expected and not s.false_alarms for s in scores) else 1)
