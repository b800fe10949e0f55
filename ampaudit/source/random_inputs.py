"""Makes random inputs of the sizes that a model's configuration names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import describe
from ampaudit.source.model_config import CONFIG_FILE

__all__ = ["OWN_INPUTS", "PLACEHOLDERS", "fuses_images", "needed_inputs", "random_input", "text_config"]

_LENGTH = 32
_MAX_ELEMENTS = 1 << 25
_SAMPLES = 16_000  # a second of sound
OWN_INPUTS = "pass --inputs FILE.py with example_inputs()"
_SPECIAL = ("pad", "eos", "image", "video", "audio", "vision_start", "vision_end")
_TOWERS = {"text_config": "input_ids", "vision_config": "pixel_values", "audio_config": "input_features"}
PLACEHOLDERS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")


def fuses_images(config: Any) -> bool:
    """Return whether tokens of images or sound stand between those of the text, which can do without."""
    return any(getattr(config, name, None) is not None for name in PLACEHOLDERS)


def text_config(config: Any, *, decoder: bool = False) -> Any:
    """Return the part of a configuration that describes the text."""
    parts = (getattr(config, name, None) for name in ("text_config", "decoder" if decoder else "encoder"))
    found: Any = next((part for part in parts if hasattr(part, "vocab_size")), config)
    if not hasattr(found, "vocab_size") and callable(getattr(found, "get_text_config", None)):
        found = found.get_text_config()
    return found


def needed_inputs(model: Any) -> list[str]:
    """Return the arguments that a call of a Transformers model needs, the most important first."""
    parameters, config = inspect.signature(model.forward).parameters, model.config
    main = getattr(model, "main_input_name", "input_ids")
    names = [main] if isinstance(main, str) else list(main)
    usual = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names += [p.name for p in parameters.values() if p.default is p.empty and p.kind is usual]
    towers = [name for part, name in _TOWERS.items() if hasattr(config, part)]
    if len(towers) > 1 and not fuses_images(config):
        names += towers
    if "token_type_ids" in parameters and "pixel_values" in parameters:  # one stream of text and images
        names += ["input_ids", "pixel_values"]
    if getattr(config, "is_encoder_decoder", False):
        ids = "decoder_input_ids" if "decoder_input_ids" in parameters else "decoder_input_values"
        names.append(ids)
    known = parameters.keys()
    return [name for name in dict.fromkeys(names) if name in known or name == main]


def random_input(model: Any, name: str, rows: int) -> Tensor:
    """Return random token ids, pixels or sound.

    Raises:
        InputError: it is another kind of input, or the configuration has absurd sizes.
    """
    make = _MAKERS.get(name)
    if make is None:
        raise _unknown(name)
    made = make(model, rows)
    return made if isinstance(made, Tensor) else torch.randn(_checked(name, rows, *made))


def _safe_ids(ids: Tensor, config: Any, vocabulary: int) -> Tensor:
    """Replace the ids that stand for padding, images or sound, and end each row as a tokenizer would."""
    numbers = {name: getattr(config, f"{name}_token_id", None) for name in _SPECIAL}
    numbers["index"] = getattr(config, "image_token_index", None)
    special = {number for number in numbers.values() if type(number) is int}
    usual = next(number for number in range(len(special) + 1) if number not in special)
    ids[torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype))] = usual
    end = numbers["eos"]
    if type(end) is int and 0 <= end < vocabulary:  # a small model may have kept the default of a large one
        ids[:, -1] = end
    return ids


def _unknown(name: str) -> InputError:
    return InputError(f"cannot make example inputs for main input {describe(name)!r}", hint=OWN_INPUTS)


def _checked(name: str, *sizes: Any) -> tuple[int, ...]:
    if None in sizes:
        raise _unknown(name)
    for size in sizes:
        if type(size) is not int or not 0 < size < 1 << 31:
            what = f"{CONFIG_FILE}: {describe(size)} for {name} is not a size"
            raise InputError(what, hint=f"restore the file, or {OWN_INPUTS}")
    if math.prod(sizes) > _MAX_ELEMENTS:
        raise InputError(
            f"example inputs of {' x '.join(map(str, sizes))} {name} are too large", hint=OWN_INPUTS
        )
    return sizes


def _ids(model: Any, rows: int, *, decoder: bool = False) -> Tensor:
    config = text_config(model.config, decoder=decoder)
    longest = _first(config, ("max_position_embeddings", "max_target_positions"), _LENGTH)
    longest = _LENGTH if longest == -1 else longest
    _checked("max_position_embeddings", longest)
    vocabulary: Any = getattr(config, "vocab_size", None)
    _checked("vocab_size", vocabulary)
    return _safe_ids(torch.randint(0, vocabulary, (rows, min(_LENGTH, longest))), model.config, vocabulary)


def _pixels(model: Any, rows: int) -> tuple[Any, ...]:
    config = _part(model.config, ("vision_config", "encoder", "backbone_config"), "image_size")
    size = _first(config, ("image_size", "input_size"), 224)
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    channels, frames = _first(config, ("num_channels",), 3), _first(config, ("num_frames",), None)
    return (*(() if frames is None else (frames,)), channels, height, width)


def _sound(model: Any, rows: int) -> tuple[Any, ...]:
    config = model.config
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return config.max_length, config.num_mel_bins
    channels = _first(config, ("audio_channels",), None)
    return (_SAMPLES,) if channels is None else (channels, _SAMPLES)


def _features(model: Any, rows: int) -> tuple[Any, ...]:
    config = _part(model.config, ("audio_config", "encoder"), "num_mel_bins")
    if hasattr(config, "spec_size"):
        return 1, 4 * config.spec_size, config.num_mel_bins
    if hasattr(config, "input_feat_per_channel"):
        return 200, config.input_feat_per_channel
    if hasattr(config, "feature_projection_input_dim"):
        return 200, config.feature_projection_input_dim
    return _first(config, ("num_mel_bins",), 80), 2 * _first(config, ("max_source_positions",), 1500)


def _part(config: Any, names: Collection[str], wanted: str) -> Any:
    """Return the first part of a configuration that has a setting, or else the whole."""
    parts = (getattr(config, name, None) for name in names)
    return next((part for part in parts if hasattr(part, wanted)), config)


def _first(config: Any, names: Collection[str], default: Any) -> Any:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), default)


_MAKERS: dict[str, Callable[[Any, int], Tensor | tuple[Any, ...]]] = {
    "input_ids": _ids,
    "inputs": _ids,
    "decoder_input_ids": lambda model, rows: _ids(model, rows, decoder=True),
    "pixel_values": _pixels,
    "input_values": _sound,
    "decoder_input_values": lambda model, rows: (_LENGTH, _first(model.config, ("num_mel_bins",), 80)),
    "input_features": _features,
    "past_values": lambda model, rows: (
        _first(model.config, ("context_length",), None),
        _first(model.config, ("num_input_channels",), None),
    ),
}
