"""``ampaudit check``: models against budgets, each in a process of its own, for continuous integration."""

from __future__ import annotations
