"""Imports packages without looking for garbage among their objects."""

from __future__ import annotations

import contextlib
import gc
from importlib import import_module

TRACER = "torch.export._trace"  # takes as long to import as torch, and each trace needs it


def import_ahead(*modules: str) -> None:
    """Import modules that this process needs later; an error is left to the import that needs one.

    torch and ``torch.export`` make 300,000 objects that live as long as the process. To look for garbage
    among them, while they are made and ever after, takes a sixth of the time to import both.
    """
    gc.disable()
    for name in modules:
        with contextlib.suppress(Exception):
            import_module(name)
    gc.freeze()
    gc.enable()
