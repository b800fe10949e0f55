"""Loads a checkpoint into a model: safetensors, whole or in shards, or a .pt state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.core.errors import WeightsError

__all__ = ["check_names", "load_weights"]

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
    """Refuse tensors that are not those of the model; tied ones may be there under one name.

    Args:
        model: the model.
        state: tensors by the model's names.
        path: where they come from, for the message.
        strict: refuse tensors that the model does not have, too.

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
            raise WeightsError(
                f"{path} does not match the model: {what}: {', '.join(names[:_SHOWN])}{more}",
                hint="pass the checkpoint of this very model",
            )


def _untied(model: nn.Module, missing: list[str]) -> list[str]:
    """Missing names whose tensor is not loaded under another name either."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    absent = set(missing)
    given = {id(t) for name, t in tensors.items() if name not in absent}
    return [name for name in missing if id(tensors.get(name)) not in given]
