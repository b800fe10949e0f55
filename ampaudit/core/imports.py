"""Imports packages with garbage collection paused."""

from __future__ import annotations

import contextlib
import gc
from importlib import import_module

TRACER = "torch.export._trace"  # takes as long to import as torch, and each trace needs it


def import_ahead(*modules: str) -> None:
    """Import modules that this process needs later; a module that fails will raise when it is needed.

    torch and ``torch.export`` create 300,000 objects that live as long as the process. Collecting garbage
    among them, during the imports and afterwards, would take a sixth of their time.
    """
    gc.disable()
    for name in modules:
        with contextlib.suppress(Exception):
            import_module(name)
    gc.freeze()
    gc.enable()
