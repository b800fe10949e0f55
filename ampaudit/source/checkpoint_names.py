"""What the tensors of a Hugging Face checkpoint are called in the model that it is loaded into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn

__all__ = ["model_names"]


def model_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The model's name for each tensor of a file, as Transformers finds it when it loads the file.

    Prefixes come and go (``bert.encoder`` in one file, ``encoder`` in another), names changed over the
    years, and some parameters are put together from several tensors, which then all get its name. A tensor
    that the model does not have keeps its own name.
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
    except Exception:  # another version of transformers, or a model that is none of its own
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
