"""Lints training scripts for mixed-precision mistakes, without importing torch."""

from __future__ import annotations
