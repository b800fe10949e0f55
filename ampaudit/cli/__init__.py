"""The command line, which imports torch only when a command needs it."""

from __future__ import annotations
