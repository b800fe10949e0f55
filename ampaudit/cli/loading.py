"""Loads the model of a command, importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampaudit.core.source_config import SourceConfig

if TYPE_CHECKING:
    from ampaudit.source import ModelSource

__all__ = ["load_source"]


def load_source(location: str, config: SourceConfig, *, limited: bool = False) -> ModelSource:
    """Load the model at a location.

    Args:
        location: of the model.
        config: how to load it.
        limited: whether the run is to stay within a memory.

    Raises:
        AuditError: see ``ampaudit.source``.
    """
    from ampaudit.cli.memory import keep_freed_memory, return_freed_memory
    from ampaudit.source.open import open_source

    if config.stream or limited:  # which is there to save memory
        return_freed_memory()
    else:
        keep_freed_memory()
    return open_source(location, config)
