"""The command line. Nothing here imports torch until a command needs it."""

from __future__ import annotations
