"""Renders documents in the formats of ``render.FORMAT_REGISTRY``."""

from __future__ import annotations

import random

_state = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_state)  # rich draws a number when it is imported
