"""Loads the model of a command, importing torch."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ampaudit.checkpoint import MANIFEST
from ampaudit.core.imports import TRACER, import_ahead
from ampaudit.core.source_config import (
    CONFIG_FILE,
    REHEARSAL,
    REHEARSAL_ENVIRONMENT,
    REHEARSAL_IMPORTS,
    SourceConfig,
)

if TYPE_CHECKING:
    from ampaudit.source import ModelSource

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_NEVER = (1 << 31) - 1


def load_source(location: str, config: SourceConfig, *, limited: bool = False) -> ModelSource:
    """Load the model at a location; ``limited`` says whether the memory of the run is.

    Raises:
        AuditError: The model cannot be loaded; see ``ampaudit.source``.
    """
    folder = Path(location)
    if not config.trust and (folder / CONFIG_FILE).is_file() and not (folder / MANIFEST).is_file():
        from ampaudit.core.sandbox import prepare_sandbox

        # before this process imports torch, so that the imports of the two take place at the same time
        prepare_sandbox(REHEARSAL, REHEARSAL_ENVIRONMENT, REHEARSAL_IMPORTS)
    import_ahead("torch")
    from ampaudit.source.open import open_source

    if config.stream or limited:
        return_freed_memory()
    else:
        keep_freed_memory()
    source = open_source(location, config)
    import_ahead(TRACER)  # only now, so that a mistake in the location shows early
    return source


def keep_freed_memory() -> bool:
    """Set the allocator's thresholds for this process; return False if the C library is not glibc.

    Without it, every tensor beyond 32 MiB is returned to the kernel when it is freed and faulted in,
    page by page, when the next one is made. Only the program does this, never the library.
    """
    return _set(((_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, 256 << 20)))


def return_freed_memory() -> bool:
    """Set the thresholds so that freed large tensors are returned to the system.

    Without it, glibc raises the size from which it asks the kernel to that of the largest tensor freed so
    far; the others then lie in its heap, where a small block behind a hole keeps the hole. Statistics of
    each value are such blocks, and with many batches they kept three times what was alive.
    """
    return _set(((_M_MMAP_THRESHOLD, 1 << 17), (_M_TRIM_THRESHOLD, 1 << 20)))


def _set(settings: tuple[tuple[int, int], ...]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
