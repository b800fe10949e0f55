"""What the commands do, callable from Python."""

from __future__ import annotations
