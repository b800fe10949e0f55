"""Puts what was traced, run and found into the values of a report."""

from __future__ import annotations
