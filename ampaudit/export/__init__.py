"""Converted checkpoints: the weights, the program, the manifest, and their verification."""

from __future__ import annotations
