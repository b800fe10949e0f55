"""A limit on time for what would take minutes or for ever if nothing stopped it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def soon(seconds: float = 30) -> Iterator[None]:
    """Fail if the block takes this many processor seconds, many times what it takes on a slow machine."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds
