"""Records the calls of a module while a program runs."""

from __future__ import annotations
