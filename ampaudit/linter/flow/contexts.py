"""Contexts that a ``with`` statement enters."""

from __future__ import annotations

import ast
from dataclasses import dataclass

__all__ = ["Autocast", "ContextManager"]


@dataclass(frozen=True, slots=True)
class Autocast:
    """An autocast context; ``None`` stands for unknown."""

    enabled: bool | None
    device: str | None
    dtype: str | None
    node: ast.AST | None = None
    explicit: bool = True  # a torch.autocast(...) of this script, not of unknown code
    conditional: bool = False  # enabled by a setting that is assumed to be on
    caches: bool = True  # keeps the casts of weights

    @property
    def is_certain(self) -> bool:
        """Whether it is on, and a block of this script."""
        return self.enabled is True and self.explicit

    @property
    def computes_float16(self) -> bool:
        """Whether it computes in float16, also if a setting may switch it off."""
        dtype = self.dtype or ("float16" if self.dtype == "" and self.device == "cuda" else "")
        return self.enabled is True and dtype == "float16"


@dataclass(frozen=True, slots=True)
class ContextManager:
    """Another relevant context manager: ``no_grad``, ``no_sync``, ``null``."""

    kind: str
