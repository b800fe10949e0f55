"""Objects that a graph uses and that are no tensors: random generators, and classes bound to TorchScript."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["ObjectSource"]


class ObjectSource:
    """Gives the graph such an object. A generator is given anew each time, in the state that the trace found.

    So every run of the graph, FP32's and the 16-bit one's, draws the same numbers, and the model's own
    generator is left as it is.
    """

    def __init__(self, held: Any) -> None:
        self._held = held
        self._state = held.get_state() if isinstance(held, torch.Generator) else None
        self.__name__ = f"{type(held).__name__.lower()}_of_the_model"

    def __call__(self) -> Any:
        """The object."""
        if self._state is None:
            return self._held
        return torch.Generator(self._held.device).set_state(self._state)
