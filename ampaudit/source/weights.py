"""Checkpoints: safetensors, or a .pt state_dict read without running any code in it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ampaudit.errors import WeightsError, first_line

__all__ = ["load_weights", "read_state_dict"]

_SHOWN = 3


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint into a model; every name and shape must match.

    Raises:
        WeightsError: see ``read_state_dict``; or names or shapes differ.
    """
    state = read_state_dict(path)
    own = model.state_dict()
    missing = [n for n in own if n not in state]
    extra = [n for n in state if n not in own]
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
    model.load_state_dict(state, strict=False)


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name.

    Raises:
        WeightsError: missing, corrupt, or a pickle that holds anything but tensors (it is not run).
    """
    if not path.is_file():
        raise WeightsError(f"no such file: {path}", hint="check the path after --weights")
    state = _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    bad = [k for k, v in state.items() if not isinstance(k, str) or not isinstance(v, torch.Tensor)]
    if bad:
        raise WeightsError(f"{path}: {bad[0]!r} is not a tensor", hint="save model.state_dict() only")
    return state


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path}: corrupt safetensors file: {error}", hint="download it again") from error
    return tensors


def _pickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path}: holds Python objects that would run code when loaded; refused",
            hint="save model.state_dict() with torch.save, or use safetensors",
        ) from error
    except Exception as error:
        raise WeightsError(
            f"{path}: corrupt checkpoint: {first_line(error)}", hint="download or save it again"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    if not isinstance(loaded, Mapping):
        raise WeightsError(f"{path}: holds {type(loaded).__name__}, not a state_dict")
    return dict(loaded)


def _untied(model: nn.Module, missing: list[str]) -> list[str]:
    """Missing names whose tensor is not loaded under another name either."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    absent = set(missing)
    given = {id(t) for name, t in tensors.items() if name not in absent}
    return [name for name in missing if id(tensors.get(name)) not in given]
