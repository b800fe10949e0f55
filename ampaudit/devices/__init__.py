"""What accelerators can do in 16 bits: a catalogue as data, and what this machine has."""

from __future__ import annotations
