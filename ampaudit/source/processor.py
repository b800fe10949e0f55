"""Runs the tokenizer or processor of a model directory; in a sandbox, unless the directory is trusted."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.source_config import CONFIG_FILE
from ampaudit.core.untrusted import describe, read_bounded
from ampaudit.source.model_config import PIPELINE

_LENGTH = 32  # tokens
_MAX_ELEMENTS = 1 << 25
_SAMPLES = 16_000  # a second of sound
OWN_INPUTS = "pass --inputs FILE.py with example_inputs()"
_SPECIAL = ("pad", "eos", "image", "video", "audio", "vision_start", "vision_end")  # tokens
_TOWERS = {"text_config": "input_ids", "vision_config": "pixel_values", "audio_config": "input_features"}
IMAGE_TOKENS = ("image_token_id", "image_token_index")
AUDIO_TOKENS = ("audio_token_id", "audio_token_index")
KINDS = ("text", "images", "audio")
_MAX_FILES, _MAX_BYTES = 64, 128_000_000  # limits on what is copied
_MAX_TOKENS = 2048
_POSITIONS = ("max_position_embeddings", "max_target_positions")
_SUFFIXES = (".bpe", ".codes", ".jinja", ".json", ".model", ".spm", ".tiktoken", ".txt")
_NAMES = (
    "tokenizer",
    "vocab",
    "preprocessor_config",
    "processor_config",
    "spiece",
    "sentencepiece",
    "source",
)
# by kind: the class that loads a part, its name in a processor, and the inputs that it produces
_PARTS = {
    "text": ("AutoTokenizer", "tokenizer", ("input_ids", "decoder_input_ids", "inputs")),
    "images": ("AutoImageProcessor", "image_processor", ("pixel_values", "flattened_patches")),
    "audio": ("AutoFeatureExtractor", "feature_extractor", ("input_features", "input_values")),
}


def _files(directory: Path) -> list[Path]:
    return [file for file in sorted(directory.iterdir()) if file.suffix in _SUFFIXES and file.is_file()]


def has_processor(directory: Path) -> bool:
    """Return whether a directory has files of a tokenizer or processor."""
    return any(file.name.startswith(_NAMES) for file in _files(directory))


def processor_directory(directory: Path) -> Path:
    """Return the directory of a model's processor: its own, or that of the pipeline's processor."""
    parts = (directory.name.replace("text_encoder", "tokenizer"), "feature_extractor")
    if (directory.parent / PIPELINE).is_file() and not has_processor(directory):
        for part in (directory.parent / name for name in parts):
            if part.is_dir() and has_processor(part):
                return part
    return directory


def copy_processor(directory: Path, folder: Path) -> None:
    """Copy the files of a tokenizer or processor, except config.json, to a folder."""
    remaining = _MAX_BYTES
    for file in _files(directory)[:_MAX_FILES]:
        size = file.stat().st_size
        if file.name != CONFIG_FILE and size <= remaining:  # directories may hold data sets
            (folder / file.name).write_bytes(read_bounded(file, size, InputError))
            remaining -= size


class Processor:
    """The parts of a processor that produce inputs for a model of Transformers, on any device.

    The folder holds the processor's files and ``config.json``; with ``trust``, its code may run.
    """

    def __init__(self, model: Any, folder: Path, *, trust: bool) -> None:
        self._config = model.config
        self._accepts = inspect.signature(model.forward).parameters.keys()
        self._whole: Any = None
        self._add_special_tokens = True
        self.length = 0  # largest number of tokens in the last batches
        self.cut: list[bool] = []  # whether each text of the last batches was truncated
        self.parts: dict[str, Any] = {}  # tokenizer, image processor and feature extractor, by kind
        self.problem = "no tokenizer or processor in the model's directory"  # or why one cannot be loaded
        if not has_processor(folder):
            return
        with contextlib.suppress(Exception):  # there may be parts without a processor
            self._whole = _load("AutoProcessor", folder, trust)
        for kind, (loader, name, _) in _PARTS.items():
            if self.takes(kind):
                try:
                    self.parts[kind] = getattr(self._whole, name, None) or _load(loader, folder, trust)
                except Exception as error:
                    why = describe(f"{type(error).__name__}: {first_line(error)}", 160)
                    self.problem = f"Transformers cannot load the {name.replace('_', ' ')}: {why}"
        tokenizer = self.parts.get("text")
        if tokenizer is not None and getattr(tokenizer, "pad_token", None) is None:
            end = tokenizer.eos_token or tokenizer.unk_token  # which is usual for decoders
            tokenizer.pad_token = end or tokenizer.convert_ids_to_tokens(0)

    def takes(self, kind: str) -> bool:
        """Return whether the model takes inputs that are produced from this kind of sample."""
        return any(name in self._accepts for name in _PARTS[kind][2])

    def sampling_rate(self) -> int:
        """Return the sampling rate of audio in Hz."""
        return int(getattr(self.parts["audio"], "sampling_rate", None) or 16_000)

    def encode(
        self, columns: Mapping[str, Sequence[Any]], rows: int, *, chat: bool
    ) -> list[dict[str, Tensor]]:
        """Encode samples as batches of tensors with the same shapes.

        ``columns`` holds the samples of each kind: all kinds have the same number, a multiple of ``rows``,
        which is that of a batch. With ``chat``, prompts are formatted with the chat template.
        """
        columns, lengths, length = dict(columns), list[int](), 0
        if "text" in columns:
            columns["text"] = self._prompts(columns["text"], chat=chat, pictured="images" in columns)
            self._add_special_tokens = not chat  # a template adds them itself
            lengths = [len(ids) for ids in self._tokens(columns["text"])["input_ids"]]
            length = min(max(lengths), self._max_tokens())
        starts = range(0, len(next(iter(columns.values()))), rows)
        batches = ({kind: items[start : start + rows] for kind, items in columns.items()} for start in starts)
        encodings = [_tensors(self._batch(batch, length)) for batch in batches]
        ids = [batch[name] for batch in encodings for name in _PARTS["text"][2] if name in batch]
        self.length = max((tensor.shape[1] for tensor in ids), default=0)
        self.cut = [tokens > self.length for tokens in lengths]
        return encodings

    def _batch(self, batch: dict[str, Any], length: int) -> dict[str, Any]:
        if len(batch) > 1 and callable(self._whole) and "input_ids" in self._accepts:
            with contextlib.suppress(Exception):  # not all processors take several kinds together
                return self._together(batch, length)
        inputs: dict[str, Any] = {}
        if "images" in batch:
            frames = getattr(self._config, "num_frames", None)  # of a video, which repeats the image
            pictures = [[image] * frames if frames else image for image in batch["images"]]
            inputs |= self.parts["images"](images=pictures, return_tensors="pt")
        if "audio" in batch:
            extract, sounds = self.parts["audio"], list(batch["audio"])
            options = {"sampling_rate": self.sampling_rate(), "return_tensors": "pt"}
            try:  # some pad to the length that the model requires
                inputs |= extract(sounds, **options)
            except Exception:
                inputs |= extract(sounds, padding=True, **options)
        if "text" in batch:
            inputs |= self._rename_ids(self._tokens(batch["text"], max_length=length))
        return inputs

    def _together(self, batch: dict[str, Any], length: int) -> dict[str, Any]:
        """Call the whole processor, which may insert image tokens into the text."""
        options: dict[str, Any] = {"padding": True}
        if not placeholders(self._config):
            options = {"padding": "max_length", "truncation": True, "max_length": length}
        if not self._add_special_tokens:
            options["add_special_tokens"] = False
        if "audio" in batch:
            options["sampling_rate"] = self.sampling_rate()
        try:
            return dict(self._whole(**batch, **options, return_tensors="pt"))
        except Exception:
            nested = batch | {"images": [[image] for image in batch["images"]]}
            return dict(self._whole(**nested, **options, return_tensors="pt"))

    def _tokens(self, prompts: Sequence[str], max_length: int | None = None) -> dict[str, Any]:
        options: dict[str, Any] = {"add_special_tokens": self._add_special_tokens}
        if max_length is not None:
            options |= {"padding": "max_length", "truncation": True, "max_length": max_length}
            options["return_tensors"] = "pt"
        return dict(self.parts["text"](list(prompts), **options))

    def _rename_ids(self, tokens: dict[str, Any]) -> dict[str, Any]:
        """Name token ids as the model's inputs, and add the decoder's ids, shifted by a start token."""
        ids = tokens["input_ids"]
        if "decoder_input_ids" in self._accepts and getattr(self._config, "is_encoder_decoder", False):
            starts = (
                getattr(self._config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "pad")
            )
            first = torch.full_like(ids[:, :1], next((i for i in starts if isinstance(i, int)), 0))
            tokens["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], 1)
        if "inputs" in self._accepts:
            return {"inputs": ids, "attention_mask": tokens["attention_mask"]}
        if "input_ids" not in self._accepts:
            return {"decoder_input_ids": tokens["decoder_input_ids"]}
        return tokens

    def has_chat_template(self) -> bool:
        """Return whether the processor or tokenizer has a chat template."""
        return any(getattr(p, "chat_template", None) for p in (self._whole, self.parts.get("text")))

    def _prompts(self, items: Sequence[Any], *, chat: bool, pictured: bool) -> list[str]:
        """Format texts as prompts, with the chat template or a placeholder for an image."""
        pictured = pictured and bool(placeholders(self._config))
        if chat:
            whole = self._whole if pictured else self.parts["text"]
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
            return [str(whole.apply_chat_template(_messages(item, pictured), **options)) for item in items]
        token = getattr(self._whole, "image_token", None) or getattr(self.parts["text"], "image_token", None)
        return [f"{token}\n{item}" if pictured and token else item for item in items]

    def _max_tokens(self) -> int:
        """Return the largest number of tokens that both the tokenizer and the model take."""
        positions = first_setting(text_config(self._config), _POSITIONS, None)
        # RoBERTa counts positions from 2
        positions = positions - 2 if isinstance(positions, int) and positions > 2 else None
        limits = (_MAX_TOKENS, getattr(self.parts["text"], "model_max_length", None), positions)
        return min(int(limit) for limit in limits if limit is not None and limit > 0)


def _load(name: str, folder: Path, trust: bool) -> Any:
    import transformers

    return getattr(transformers, name).from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


def _messages(item: Any, pictured: bool) -> list[dict[str, Any]]:
    """Return a sample as chat messages, with an image in the user's first message if ``pictured``."""
    chat = [{"role": "user", "content": item}] if isinstance(item, str) else item
    messages: list[dict[str, Any]] = [dict(message) for message in chat]
    first = next((m for m in messages if m["role"] == "user"), messages[0])
    if pictured and isinstance(first.get("content"), str):
        first["content"] = [{"type": "image"}, {"type": "text", "text": first["content"]}]
    return messages


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Select the tensors, converted to int64, float32 or bool."""
    tensors = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            dtype = torch.float32 if value.is_floating_point() else torch.int64
            tensors[name] = value if value.dtype == torch.bool else value.to(dtype).contiguous()
    return tensors


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
        names.append("decoder_input_ids" if "decoder_input_ids" in parameters else "decoder_input_values")
    return [name for name in dict.fromkeys(names) if name in parameters or name == main]


def random_input(model: Any, name: str, rows: int) -> Tensor:
    """Return random token ids, pixels, sound or another input of known shape.

    Raises:
        InputError: The shape of the input is unknown, or the configuration has absurd sizes.
    """
    if name not in _IDS:
        return torch.randn(input_sizes(model, name, rows))
    decoder = _IDS[name]
    text, limit = text_config(model.config, decoder=decoder), max_tokens(model.config, decoder=decoder)
    vocabulary: Any = getattr(text, "vocab_size", None)
    check_sizes("vocab_size", vocabulary)
    length = _LENGTH if limit is None else min(_LENGTH, limit)
    ids = torch.randint(0, vocabulary, (rows, length))
    # an ordinary token takes the place of special ones, and the end token ends each row
    numbers = {name: getattr(model.config, f"{name}_token_id", None) for name in _SPECIAL}
    numbers["index"] = getattr(model.config, "image_token_index", None)
    special = {number for number in numbers.values() if type(number) is int}
    ordinary = next(number for number in range(len(special) + 1) if number not in special)
    ids[torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype))] = ordinary
    end = numbers["eos"]
    if type(end) is int and 0 <= end < vocabulary:  # a small model may have kept the default of a large one
        ids[:, -1] = end
    return ids


def input_sizes(model: Any, name: str, rows: int) -> tuple[int, ...]:
    """Return the shape of an input other than token ids.

    Raises:
        InputError: See ``random_input``.
    """
    sizes = _SIZES.get(name, lambda config: (None,))
    return check_sizes(name, rows, *sizes(model.config))


def max_tokens(config: Any, *, decoder: bool = False) -> int | None:
    """Return the maximum number of tokens; ``None`` if the configuration does not limit it.

    Raises:
        InputError: The value is not a size.
    """
    limit: Any = first_setting(text_config(config, decoder=decoder), _POSITIONS, None)
    return None if limit is None or limit == -1 else check_sizes("max_position_embeddings", limit)[0]


def part_with(config: Any, names: Collection[str], setting: str) -> Any:
    """Return the first part of a configuration with a setting, or the whole configuration."""
    parts = (getattr(config, name, None) for name in names)
    return next((part for part in parts if hasattr(part, setting)), config)


def first_setting(config: Any, names: Collection[str], default: Any) -> Any:
    """Return the first setting that is not ``None``, or the default."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def check_sizes(name: str, *sizes: Any) -> tuple[int, ...]:
    """Check the shape of an input taken from a configuration.

    Raises:
        InputError: A size is missing, invalid or absurdly large.
    """
    if None in sizes:
        raise InputError(
            f"cannot generate the input {describe(name)!r}: its shape is unknown", hint=OWN_INPUTS
        )
    for size in sizes:
        if type(size) is not int or not 0 < size < 1 << 31:
            what = f"{CONFIG_FILE}: {describe(size)} for {name} is not a size"
            raise InputError(what, hint=f"restore the file, or {OWN_INPUTS}")
    if math.prod(sizes) > _MAX_ELEMENTS:
        raise InputError(
            f"the input {name} of {' x '.join(map(str, sizes))} values is too large", hint=OWN_INPUTS
        )
    return sizes


def _pixels(config: Any) -> tuple[Any, ...]:
    config = part_with(config, ("vision_config", "encoder", "backbone_config"), "image_size")
    size = first_setting(config, ("image_size", "input_size"), 224)
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    sizes = first_setting(config, ("num_channels",), 3), height, width
    frames = first_setting(config, ("num_frames",), None)
    return sizes if frames is None else (frames, *sizes)


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
    for name in ("input_feat_per_channel", "feature_projection_input_dim"):
        if hasattr(config, name):
            return 200, getattr(config, name)
    positions = first_setting(config, ("max_source_positions",), 1500)
    return first_setting(config, ("num_mel_bins",), 80), 2 * positions


_IDS = {"input_ids": False, "inputs": False, "decoder_input_ids": True}  # whether for the decoder
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
