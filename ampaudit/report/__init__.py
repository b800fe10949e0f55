"""The report as a value, and the ways to print it."""

from __future__ import annotations
