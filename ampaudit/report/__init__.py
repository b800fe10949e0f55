"""Documents as values: the results of every command."""

from __future__ import annotations
