"""Runs the FP32 reference and the converted model in lock-step, and records every site."""

from __future__ import annotations
