"""Everything that a saved report can be turned into: for reviews, test runners, spreadsheets, a browser."""

from __future__ import annotations
