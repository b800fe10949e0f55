"""Tells glibc to keep freed memory: an audit frees and asks again for the same large tensors all the time."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Set the allocator's thresholds for this process; False where the C library is not glibc.

    Without it, every tensor beyond 32 MiB is returned to the kernel when it is freed and faulted in,
    page by page, when the next one is made. Only the program does this, never the library.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, 256 << 20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
