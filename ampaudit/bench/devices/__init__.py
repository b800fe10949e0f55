"""The catalogue of accelerators, and what this machine is."""

from __future__ import annotations
