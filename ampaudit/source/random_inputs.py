"""Generates random inputs of the sizes in a model's configuration."""

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

__all__ = [
    "AUDIO_TOKENS",
    "IMAGE_TOKENS",
    "OWN_INPUTS",
    "check_sizes",
    "first_setting",
    "input_sizes",
    "longest_text",
    "needed_inputs",
    "part_with",
    "placeholders",
    "random_input",
    "text_config",
]

_LENGTH = 32
_MAX_ELEMENTS = 1 << 25
_SAMPLES = 16_000  # a second of sound
OWN_INPUTS = "pass --inputs FILE.py with example_inputs()"
_SPECIAL = ("pad", "eos", "image", "video", "audio", "vision_start", "vision_end")
_TOWERS = {"text_config": "input_ids", "vision_config": "pixel_values", "audio_config": "input_features"}
IMAGE_TOKENS = ("image_token_id", "image_token_index")
AUDIO_TOKENS = ("audio_token_id", "audio_token_index")


def placeholders(config: Any) -> list[int]:
    """Return the placeholder token ids for images and audio in a text."""
    ids = (getattr(config, name, None) for name in (*IMAGE_TOKENS, *AUDIO_TOKENS))
    return [number for number in ids if type(number) is int]


def text_config(config: Any, *, decoder: bool = False) -> Any:
    """Return the part of a configuration that describes the text model."""
    parts = (getattr(config, name, None) for name in ("text_config", "decoder" if decoder else "encoder"))
    section: Any = next((part for part in parts if hasattr(part, "vocab_size")), config)
    if not hasattr(section, "vocab_size") and callable(getattr(section, "get_text_config", None)):
        section = section.get_text_config()
    return section


def needed_inputs(model: Any) -> list[str]:
    """Return the required inputs of a Transformers model, the main one first."""
    parameters, config = inspect.signature(model.forward).parameters, model.config
    main = getattr(model, "main_input_name", "input_ids")
    names = [main] if isinstance(main, str) else list(main)
    usual = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names += [p.name for p in parameters.values() if p.default is p.empty and p.kind is usual]
    towers = [name for part, name in _TOWERS.items() if hasattr(config, part)]
    if len(towers) > 1 and not placeholders(config):
        names += towers
    pictured = "token_type_ids" in parameters and "pixel_values" in parameters
    if pictured and not placeholders(config):  # one stream of text and images
        names += ["input_ids", "pixel_values"]
    if getattr(config, "is_encoder_decoder", False):
        ids = "decoder_input_ids" if "decoder_input_ids" in parameters else "decoder_input_values"
        names.append(ids)
    accepted = parameters.keys()
    return [name for name in dict.fromkeys(names) if name in accepted or name == main]


def random_input(model: Any, name: str, rows: int) -> Tensor:
    """Return random token ids, pixels or sound.

    Raises:
        InputError: The input is of another kind, or the configuration has absurd sizes.
    """
    if name in _IDS:
        return _ids(model, rows, decoder=_IDS[name])
    return torch.randn(input_sizes(model, name, rows))


def input_sizes(model: Any, name: str, rows: int) -> tuple[int, ...]:
    """Return the shape of an input other than token ids.

    Raises:
        InputError: See ``random_input``.
    """
    sizes = _SIZES.get(name)
    if sizes is None:
        raise _unknown(name)
    return check_sizes(name, rows, *sizes(model.config))


def longest_text(config: Any, *, decoder: bool = False) -> int | None:
    """Return the maximum number of tokens, if the configuration gives one.

    Raises:
        InputError: The value is not a size.
    """
    names = ("max_position_embeddings", "max_target_positions")
    longest: Any = first_setting(text_config(config, decoder=decoder), names, None)
    if longest is None or longest == -1:
        return None
    check_sizes("max_position_embeddings", longest)
    return int(longest)


def part_with(config: Any, names: Collection[str], setting: str) -> Any:
    """Return the first part of a configuration with a setting, or the whole configuration."""
    parts = (getattr(config, name, None) for name in names)
    return next((part for part in parts if hasattr(part, setting)), config)


def first_setting(config: Any, names: Collection[str], default: Any) -> Any:
    """Return the first setting that is not ``None``, or the default."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def _safe_ids(ids: Tensor, config: Any, vocabulary: int) -> Tensor:
    """Replace special token ids by an ordinary one, and end each row with the end token."""
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


def check_sizes(name: str, *sizes: Any) -> tuple[int, ...]:
    """Check the shape of an input taken from a configuration.

    Raises:
        InputError: A size is missing, invalid or absurdly large.
    """
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


def _ids(model: Any, rows: int, *, decoder: bool) -> Tensor:
    config, longest = text_config(model.config, decoder=decoder), longest_text(model.config, decoder=decoder)
    vocabulary: Any = getattr(config, "vocab_size", None)
    check_sizes("vocab_size", vocabulary)
    length = _LENGTH if longest is None else min(_LENGTH, longest)
    return _safe_ids(torch.randint(0, vocabulary, (rows, length)), model.config, vocabulary)


def _pixels(config: Any) -> tuple[Any, ...]:
    config = part_with(config, ("vision_config", "encoder", "backbone_config"), "image_size")
    size = first_setting(config, ("image_size", "input_size"), 224)
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    channels, frames = (
        first_setting(config, ("num_channels",), 3),
        first_setting(config, ("num_frames",), None),
    )
    return (*(() if frames is None else (frames,)), channels, height, width)


def _sound(config: Any) -> tuple[Any, ...]:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return config.max_length, config.num_mel_bins
    channels = first_setting(config, ("audio_channels",), None)
    return (_SAMPLES,) if channels is None else (channels, _SAMPLES)


def _features(config: Any) -> tuple[Any, ...]:
    config = part_with(config, ("audio_config", "encoder"), "num_mel_bins")
    if hasattr(config, "spec_size"):
        return 1, 4 * config.spec_size, config.num_mel_bins
    if hasattr(getattr(config, "encoder_config", None), "input_dim"):
        return 200, config.encoder_config.input_dim
    if hasattr(config, "input_feat_per_channel"):
        return 200, config.input_feat_per_channel
    if hasattr(config, "feature_projection_input_dim"):
        return 200, config.feature_projection_input_dim
    return first_setting(config, ("num_mel_bins",), 80), 2 * first_setting(
        config, ("max_source_positions",), 1500
    )


_IDS = {"input_ids": False, "inputs": False, "decoder_input_ids": True}  # whether of a decoder
_SIZES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "pixel_values": _pixels,
    "input_values": _sound,
    "decoder_input_values": lambda config: (_LENGTH, first_setting(config, ("num_mel_bins",), 80)),
    "input_features": _features,
    "past_values": lambda config: (
        first_setting(config, ("context_length",), None),
        first_setting(config, ("num_input_channels",), None),
    ),
}
