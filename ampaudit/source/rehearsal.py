"""Builds the model of a configuration without weights; in a sandbox first, to see that it can be built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.core.errors import SourceError
from ampaudit.source.model_config import CONFIG_FILE

__all__ = ["configured", "empty_model", "named_architecture", "named_class", "rehearse"]


def rehearse(table: dict[str, Any]) -> Callable[[], tuple[str, int]]:
    """Return the function that a sandbox calls; it returns the model's class and its bytes in float32."""
    architecture = named_architecture(table)

    def work() -> tuple[str, int]:
        config = configured(architecture, table, Path.cwd())
        with torch.device("meta"):
            model = empty_model(architecture, config)
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
        size = sum(t.numel() * (4 if t.is_floating_point() else t.itemsize) for t in tensors)
        return type(model).__name__, size

    return work


def named_architecture(table: dict[str, Any]) -> Any:
    """Return the class that a configuration names, or ``AutoModel`` if it names none.

    Raises:
        SourceError: Transformers has no such model.
    """
    import transformers

    found, names = named_class(table), table.get("architectures") or []
    if found is None and names:
        raise SourceError(
            f"architecture {names[0]!r} is not in this version of transformers",
            hint="update transformers; code that ships with a model directory runs only with --trust",
        )
    return found or transformers.AutoModel


def named_class(table: dict[str, Any]) -> Any:
    """Return the first model class of Transformers that a configuration names, or ``None``."""
    import transformers

    for name in table.get("architectures") or []:
        found = getattr(transformers, str(name), None)
        base = transformers.PreTrainedModel
        if isinstance(found, type) and issubclass(found, base) and found is not base:
            return found
    return None


def configured(architecture: Any, table: dict[str, Any], folder: Path) -> Any:
    """Return the configuration that Transformers makes of a table.

    Args:
        architecture: the model's class.
        table: see ``read_model_config``.
        folder: an empty one, of which Transformers reads nothing else.
    """
    import transformers

    (folder / CONFIG_FILE).write_text(json.dumps(table), encoding="utf-8")
    kind = getattr(architecture, "config_class", None) or transformers.AutoConfig
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def empty_model(architecture: Any, config: Any, *, trust: bool = False) -> nn.Module:
    """Build a model without weights, on the device and under the context that are set."""
    if hasattr(architecture, "from_config"):
        model = architecture.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    else:
        model = architecture._from_config(config, dtype=torch.float32)
    assert isinstance(model, nn.Module)
    return model
