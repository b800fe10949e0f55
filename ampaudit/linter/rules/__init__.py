"""Rules on the events of one entry point, on those of a whole file, or on the syntax alone."""

from __future__ import annotations
