"""Describes accelerators in a catalogue, and this machine."""

from __future__ import annotations
