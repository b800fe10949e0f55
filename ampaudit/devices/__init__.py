"""Describes accelerators in a catalogue, and this machine, and estimates what ops cost on them."""

from __future__ import annotations
