"""Reads a state_dict from a ``.pt`` file without running code in it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ampaudit.core.errors import WeightsError, first_line

__all__ = ["read_state_dict"]


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a pickled checkpoint by name, mapped into memory where torch can.

    Raises:
        WeightsError: missing, corrupt, or a pickle with anything but tensors (it is not run).
    """
    if not path.is_file():
        raise WeightsError(f"no such file: {path}", hint="check the path")
    state = _state_dict(_load(path, mapped=True), path)
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise WeightsError(f"{path}: {name!r} is not a tensor", hint="save model.state_dict() only")
    return state


def _load(path: Path, *, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path}: holds Python objects that would run code when loaded; refused",
            hint="save model.state_dict() with torch.save, or use safetensors",
        ) from error
    except Exception as error:
        if mapped:  # files of torch before 1.6 cannot be mapped
            return _load(path, mapped=False)
        raise WeightsError(
            f"{path}: corrupt checkpoint: {first_line(error)}", hint="download or save it again"
        ) from error


def _state_dict(loaded: Any, path: Path) -> dict[str, torch.Tensor]:
    for wrapper in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    if not isinstance(loaded, Mapping):
        raise WeightsError(f"{path}: holds {type(loaded).__name__}, not a state_dict")
    return dict(loaded)
