"""Checkpoints as streams of bytes: read tensor by tensor, in pieces, and written the same way."""

from __future__ import annotations

from ampaudit.checkpoint.header import Entry, Header, read_header
from ampaudit.checkpoint.open import Checkpoint, open_checkpoint
from ampaudit.checkpoint.parts import Part
from ampaudit.checkpoint.write import Written, write_part, write_safetensors

__all__ = [
    "Checkpoint",
    "Entry",
    "Header",
    "Part",
    "Written",
    "open_checkpoint",
    "read_header",
    "write_part",
    "write_safetensors",
]
