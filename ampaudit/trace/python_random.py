"""The random numbers of Python and NumPy: a trace keeps the ones that it draws as constants."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["PythonRandom"]


class PythonRandom:
    """The state of both generators at the moment when this is made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def moved(self) -> bool:
        """Whether a number has been drawn since."""
        return bool(random.getstate() != self._python) or _differ(self._numpy, _numpy_state())

    def restore(self) -> None:
        """Go on from here."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Draw from here inside, and go on outside as if nothing had been drawn."""
        outside = PythonRandom()
        self.restore()
        try:
            yield
        finally:
            outside.restore()


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _differ(first: Any, second: Any) -> bool:
    """Whether two states of NumPy differ: they hold an array, which has no truth value."""
    return bool(_plain(first) != _plain(second))


def _plain(state: Any) -> Any:
    """A NumPy state as plain values."""
    return None if state is None else tuple(v.tobytes() if hasattr(v, "tobytes") else v for v in state)
