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
    """Load the model at a location; ``limited`` tells whether the run has a memory limit.

    Raises:
        AuditError: The model cannot be loaded; see ``ampaudit.source``.
    """
    folder = Path(location)
    if not config.trust and (folder / CONFIG_FILE).is_file() and not (folder / MANIFEST).is_file():
        from ampaudit.core.sandbox import prepare_sandbox

        # first, so that the sandbox and this process import torch at the same time
        prepare_sandbox(REHEARSAL, REHEARSAL_ENVIRONMENT, REHEARSAL_IMPORTS)
    import_ahead("torch")
    from ampaudit.source.open import open_source

    if config.stream or limited:
        return_freed_memory()
    else:
        keep_freed_memory()
    source = open_source(location, config)
    import_ahead(TRACER)  # last, to report a mistake in the location early
    return source


def keep_freed_memory() -> bool:
    """Set the allocator's thresholds so that freed memory is kept; ``False`` if the C library is not glibc.

    By default, the memory of a tensor beyond 32 MiB is returned to the kernel when the tensor is freed, and
    faulted in page by page for the next one. Only the program does this, never the library.
    """
    return _set(((_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, 256 << 20)))


def return_freed_memory() -> bool:
    """Set the allocator's thresholds so that the memory of freed large tensors is returned to the system.

    By default, glibc raises its mmap threshold to the size of the largest tensor freed so far. Other tensors
    then lie in its heap, which cannot shrink below a block in use. The statistics of each value are such
    blocks: with many batches, they kept three times the memory in use.
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
