"""Loads a checkpoint into a model, and matches its names to the model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import MAX_MESSAGE, describe, describe_path

__all__ = ["check_names", "load_weights", "model_names"]

_SHOWN = 3


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint into a model; every name and shape must match.

    Raises:
        WeightsError: see ``open_checkpoint``; or names or shapes differ.
    """
    state = map_checkpoint(path).tensors
    check_names(model, state, path)
    model.load_state_dict(state, strict=False)


def check_names(
    model: nn.Module, state: Mapping[str, torch.Tensor], path: Path, *, strict: bool = True
) -> None:
    """Reject tensors that do not match the model's; tied ones may have just one of their names.

    Args:
        model: the model.
        state: tensors by the model's names.
        path: the checkpoint, for the message.
        strict: also reject tensors that the model lacks.

    Raises:
        WeightsError: names or shapes differ.
    """
    own = model.state_dict()
    missing = [n for n in own if n not in state]
    extra = [n for n in state if n not in own] if strict else []
    shapes = [
        f"{n} is {tuple(state[n].shape)}, the model has {tuple(own[n].shape)}"
        for n in own
        if n in state and own[n].shape != state[n].shape
    ]
    for what, names in (("missing", _untied(model, missing)), ("unexpected", extra), ("shape", shapes)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            start = f"{describe_path(path)} does not match the model: {what}: "
            shown = describe(", ".join(names[:_SHOWN]), MAX_MESSAGE - len(start) - len(more))
            raise WeightsError(f"{start}{shown}{more}", hint="pass a checkpoint of this model")


def _untied(model: nn.Module, missing: list[str]) -> list[str]:
    """Return the missing names whose tensor is not loaded under another name either."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    absent = set(missing)
    given = {id(t) for name, t in tensors.items() if name not in absent}
    return [name for name in missing if id(tensors.get(name)) not in given]


def model_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map the tensor names of a Hugging Face checkpoint to the model's, as Transformers does.

    Prefixes differ (``bert.encoder`` in one file, ``encoder`` in another), names changed over the years, and
    some parameters are joined from several tensors, which then all get its name. A tensor that the model
    lacks keeps its own name.
    """
    own = model.state_dict()
    rename = _renaming(model, own)
    return {name: rename(name) for name in names}


def _renaming(model: nn.Module, own: dict[str, Any]) -> Any:
    prefix = str(getattr(model, "base_model_prefix", ""))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(cast(Any, model))
    except Exception:  # another version of transformers, or an unknown model
        return lambda name: _by_prefix(name, prefix, own)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def rename(name: str) -> str:
        found = str(rename_source_key(name, renamings, converters, prefix, own)[0])
        return found if found in own else _by_prefix(name, prefix, own)

    return rename


def _by_prefix(name: str, prefix: str, own: dict[str, Any]) -> str:
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in own), name)
