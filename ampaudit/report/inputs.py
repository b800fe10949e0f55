"""Describes the origin of the inputs of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GIVEN", "InputsInfo", "of_made_up"]


@dataclass(frozen=True, slots=True)
class InputsInfo:
    """The origin of an audit's batches.

    Attributes:
        origin: ``given`` as tensors by the user, ``stored`` in the program, made by the model's processor of
            the user's ``file`` or of a built-in ``sample``, or ``random``.
        detail: in words, where there is more to say.
    """

    origin: Literal["given", "stored", "file", "sample", "random"]
    detail: str = ""

    @property
    def made_up(self) -> str:
        """Description of random or built-in inputs; empty for inputs of the user or the program."""
        return {"sample": "built-in samples", "random": "random inputs"}.get(self.origin, "")


GIVEN = InputsInfo("given")


def of_made_up(inputs: InputsInfo | None) -> str:
    """Return `` of random inputs`` or `` of built-in samples``; empty for other inputs."""
    return f" of {inputs.made_up}" if inputs is not None and inputs.made_up else ""
