"""Generates inputs for a model directory: from the user's files, built-in samples or random numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import wave
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.checkpoint.open import map_checkpoint
from ampaudit.core.errors import AuditError, InputError, UsageError, first_line
from ampaudit.core.text import plural
from ampaudit.core.untrusted import describe, describe_path, parse_json, read_bounded
from ampaudit.source.inputs import unknown_axis
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch
from ampaudit.source.processor import (
    AUDIO_TOKENS,
    IMAGE_TOKENS,
    KINDS,
    OWN_INPUTS,
    Processor,
    check_sizes,
    first_setting,
    input_sizes,
    max_tokens,
    needed_inputs,
    part_with,
    placeholders,
    random_input,
    text_config,
)
from ampaudit.trace.fake_model import without_data
from ampaudit.trace.opnames import written_values

_DATA_DEPENDENT_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_aten = torch.ops.aten
_USUAL_SIDE = 224  # pixels; some models take images of any size up to a large one
_MAX_TILES = 5  # of an image: 2 x 2 and the whole
_SIDE = 12  # patches; divisible by merge factors 2, 3 and 4
_PATCHES = {"image_grid_thw", "image_grid_hw", "image_position_ids", "spatial_shapes"}
Array = np.ndarray[Any, Any]
_MAX_TEXT = 64_000_000  # bytes
_MAX_PIXELS = 1 << 26
_MAX_SECONDS = 60
_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_SOUNDS = (".aiff", ".flac", ".mp3", ".ogg", ".wav")
_SENTENCES = (
    "The kettle was still warm when she came back from the garden.",
    "How do I convert a list of strings into numbers without a loop?",
    "Rain is expected in the north on Tuesday, with strong winds along the coast; the ferries may stop.",
    "Our invoice 4071 of 12 March, over 1,250.00 euros, has not been paid.",
    "I would not buy this camera again: the menu is slow, and the battery lasts two hours at most.",
    "A river carries sand to the sea, and the sea carries it back to the beach.",
    "No.",
    "In the second experiment the temperature rose by 0.3 degrees, which is within the error of measurement.",
    "def area(width, height): return width * height",
    "Where the road forks, keep left, cross the old bridge, and ask for Marta at the mill.",
    "WARNING!!! The file could not be read (error 13: permission denied).",
    "Seven small boats left the harbor at dawn; by noon six of them had come home again.",
)
_ROWS = {"text": 4, "images": 2, "audio": 2}  # rows per batch
_RANDOM_ROWS = 2
_MAX_BATCHES = 16  # from files, unless the user gives a number
_SEQUENCES = (  # inputs whose last axis counts tokens or audio samples
    *("input_ids", "inputs", "attention_mask", "token_type_ids", "decoder_input_ids"),
    *("decoder_attention_mask", "input_values", "mm_token_type_ids"),
)
_WITH_PLACEHOLDERS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_DTYPES = (torch.int64, torch.float32, torch.bool)


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Ordered samples of one kind, and the name of their file or directory."""

    items: Iterable[Any]  # texts, lists of chat messages, images, or mono recordings
    total: int | None = None  # for the built-in ones, which never end
    name: str = ""


def texts(path: Path | None) -> SampleSet:
    """Return the samples of a text file, or built-in sentences.

    A ``.jsonl`` file has an object per line, with ``text`` or chat ``messages``. The samples of other files
    are the paragraphs that blank lines separate, or else the lines.

    Raises:
        InputError: The file is not UTF-8, holds no sample, or has a JSON line with neither key.
    """
    if path is None:
        return SampleSet(_sentences())
    try:
        text = read_bounded(path, _MAX_TEXT, InputError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{describe_path(path)}: not UTF-8 text", hint="convert it to UTF-8") from error
    lines = [line.strip() for line in text.strip().splitlines()]
    samples: list[Any] = [line for line in lines if line]
    if path.suffix.lower() == ".jsonl":
        samples = [_parse_line(path, number, line) for number, line in enumerate(lines, 1) if line]
    elif len(samples) < len(lines):
        samples = [part.replace("\n", " ").strip() for part in "\n".join(lines).split("\n\n") if part.strip()]
    if not samples:
        raise InputError(f"{describe_path(path)}: no text in it", hint="write one sample per line")
    return SampleSet(samples, len(samples), path.name)


def images(path: Path | None) -> SampleSet:
    """Return the images of a directory sorted by name, or built-in drawings.

    Raises:
        InputError: The directory holds no image, Pillow is missing, or (lazily) a file cannot be decoded.
    """
    if path is None:
        return SampleSet(_drawings())
    files = _files(path, _IMAGES, "images")
    if importlib.util.find_spec("PIL") is None:
        raise InputError("--images needs Pillow", hint="pip install pillow")
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = _MAX_PIXELS

    def decoded(file: Path) -> Any:
        with Image.open(file) as image:
            return image.convert("RGB")

    return SampleSet(_decode_all(files, decoded), len(files), path.name)


def sounds(path: Path | None, rate: int) -> SampleSet:
    """Return the recordings of a directory sorted by name, or built-in tones, as mono at a sampling rate.

    Raises:
        InputError: The directory holds no recording, or (lazily) a file cannot be decoded.
    """
    if path is None:
        return SampleSet(_tones(rate))
    files = _files(path, _SOUNDS, "recordings")

    def decoded(file: Path) -> Array:
        wave_, file_rate = _read_wave(file) if file.suffix.lower() == ".wav" else _read_sound(file)
        mono = wave_.mean(axis=1)[: _MAX_SECONDS * file_rate]
        times = np.arange(int(len(mono) * rate / file_rate)) / rate
        resampled: Array = np.interp(times, np.arange(len(mono)) / file_rate, mono).astype(np.float32)
        return resampled

    return SampleSet(_decode_all(files, decoded), len(files), path.name)


def _files(path: Path, suffixes: tuple[str, ...], what: str) -> list[Path]:
    try:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in suffixes and file.is_file())
    except OSError as error:
        raise InputError(f"{describe_path(path)}: {error.strerror}", hint="give a directory") from error
    if not files:
        raise InputError(f"{describe_path(path)}: no {what} in it", hint=f"they end in {', '.join(suffixes)}")
    return files


def _decode_all(files: Iterable[Path], decode: Callable[[Path], Any]) -> Iterator[Any]:
    for file in files:
        try:
            yield decode(file)
        except InputError:
            raise
        except Exception as error:
            why = f"{describe_path(file)}: cannot be decoded: {error}"
            raise InputError(why, hint="convert the file, or move it elsewhere") from error


def _read_wave(file: Path) -> tuple[Array, int]:
    """Read integer PCM with the standard library, and anything else with soundfile."""
    try:
        with wave.open(str(file)) as stream:
            width, channels, rate = stream.getsampwidth(), stream.getnchannels(), stream.getframerate()
            raw = np.frombuffer(stream.readframes(min(stream.getnframes(), _MAX_SECONDS * rate)), np.uint8)
    except wave.Error:
        return _read_sound(file)
    if width == 1:
        values = raw.astype(np.float32) / 128 - 1
    else:  # little-endian, into the upper bytes of an int32
        wide = np.zeros((raw.size // width, 4), np.uint8)
        wide[:, 4 - width :] = raw[: raw.size // width * width].reshape(-1, width)
        values = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return values.reshape(-1, channels), rate


def _read_sound(file: Path) -> tuple[Array, int]:
    if importlib.util.find_spec("soundfile") is None:
        hint = "pip install soundfile, or convert it to PCM .wav"
        raise InputError(f"{describe_path(file)}: needs the soundfile package", hint=hint)
    import soundfile

    with soundfile.SoundFile(file) as stream:
        rate = int(stream.samplerate)
        return stream.read(_MAX_SECONDS * rate, dtype="float32", always_2d=True), rate


def _parse_line(path: Path, number: int, line: str) -> Any:
    where, hint = f"{describe_path(path)}:{number}", 'write {"text": "..."} or {"messages": [...]} per line'
    try:
        sample = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}", hint=hint) from error
    if isinstance(sample, dict):
        sample = sample.get("messages", sample.get("text"))
    chat = isinstance(sample, list) and sample and all(isinstance(m, dict) and "role" in m for m in sample)
    if not chat and not isinstance(sample, str):
        raise InputError(f"{where}: neither text nor messages", hint=hint)
    return sample


def _sentences() -> Iterator[str]:
    """Yield sentences of different kinds and lengths, then pairs of them."""
    yield from _SENTENCES
    for index in count():
        second, first = divmod(index, len(_SENTENCES))
        yield f"{_SENTENCES[first]} {_SENTENCES[(first + second + 1) % len(_SENTENCES)]}"


def _drawings() -> Iterator[Array]:
    """Yield pictures of a bright disk before a colored gradient, with some noise."""
    for index in count():
        random = np.random.default_rng(index)
        y, x = np.mgrid[0:240, 0:320] / 240
        tint, middle = random.uniform(0.2, 1, 3), random.uniform(0.3, 0.8, 2)
        disk = ((x - middle[0]) ** 2 + (y - middle[1]) ** 2 < 0.04)[..., None]
        picture = np.where(disk, 0.95, (x[..., None] + y[..., None]) / 2.4 * tint)
        picture = picture + random.normal(0, 0.03, picture.shape)
        yield (picture.clip(0, 1) * 255).astype(np.uint8)


def _tones(rate: int) -> Iterator[Array]:
    """Yield two seconds of a voice-like tone: syllables of a few harmonics over faint noise."""
    for index in count():
        random, t = np.random.default_rng(index), np.arange(2 * rate) / rate
        pitch = random.uniform(100, 240) * (1 + 0.05 * np.sin(2 * np.pi * 3 * t))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        tone = sum(np.sin(k * phase) / k for k in range(1, 8))
        syllables = np.clip(np.sin(2 * np.pi * 2.5 * t + index), 0, 1)
        yield (0.15 * tone * syllables + random.normal(0, 0.003, t.shape)).astype(np.float32)


class InputRequest(TypedDict):
    """A request for inputs: the user's files by kind, the number of batches, and a seed."""

    files: dict[str, str]
    batches: int | None
    seed: int


class GeneratedInputs(TypedDict):
    """Batches of inputs, their origin, and a description of it."""

    batches: list[dict[str, Tensor]]
    origin: Literal["file", "sample", "random"]
    detail: str


def generate_inputs(
    model: Any, request: InputRequest, folder: Path, *, trust: bool = False
) -> GeneratedInputs:
    """Generate batches of inputs for a model of Transformers, on any device.

    The folder holds ``config.json`` and the processor's files; with ``trust``, its code may run.

    Raises:
        InputError: A file cannot be used, or inputs of this kind cannot be generated.
    """
    torch.manual_seed(request["seed"] + INPUT_SEED_OFFSET)
    processor = Processor(model, folder, trust=trust)
    for kind in request["files"]:
        if not processor.takes(kind):
            needs = ", ".join(needed_inputs(model))
            raise InputError(f"--{kind}: {type(model).__name__} takes none", hint=f"its inputs are {needs}")
        if kind not in processor.parts:
            hint = f"copy its files beside the model, or {OWN_INPUTS}"
            raise InputError(f"--{kind}: {processor.problem}", hint=hint)
    problem = processor.problem
    if processor.parts:
        try:
            return _process(model, processor, request)
        except Exception as error:
            problem = describe(f"its processor failed: {type(error).__name__}: {first_line(error)}", 200)
            if isinstance(error, AuditError):
                raise
            if request["files"]:
                raise InputError(problem, hint=OWN_INPUTS) from error
    batches, _ = _fuse_all(model, [_complete(model, {}) for _ in range(request["batches"] or 1)])
    return GeneratedInputs(
        batches=batches, origin="random", detail=f"random {', '.join(batches[0])}: {problem}"
    )


def _process(model: Any, processor: Processor, request: InputRequest) -> GeneratedInputs:
    samples = {kind: _samples(processor, kind, request) for kind in KINDS if kind in processor.parts}
    total = max((sample_set.total or 0 for sample_set in samples.values()), default=0)
    rows, batches = min(_ROWS[kind] for kind in samples), request["batches"] or 1
    if total:
        batches = min(-(-total // rows), request["batches"] or _MAX_BATCHES)
        rows = min(rows, total)
    number = rows * batches  # samples start over when they run out
    columns = {
        kind: list(islice(cycle(islice(sample_set.items, number)), number))
        for kind, sample_set in samples.items()
    }
    chat = any(isinstance(item, list) for item in columns.get("text", ()))
    if chat and not processor.has_chat_template():
        raise InputError("--text: the tokenizer has no chat template", hint="write texts, not messages")
    templated = samples.get("text", _NOTHING).total is None and processor.has_chat_template()
    how = " in the chat template" if chat or templated else ""
    try:
        encoded = processor.encode(columns, rows, chat=chat or templated)
    except Exception as error:
        if chat or not templated or type(error).__name__ == "SecurityError":  # of Jinja
            raise
        how = " without the chat template, which fails"  # some take only what has a picture, or tools
        encoded = processor.encode(columns, rows, chat=False)
    completed, further = _fuse_all(model, [_complete(model, tensors) for tensors in encoded])
    added = [name for name in needed_inputs(model) if name not in encoded[0]]
    added += [fusion.name for fusion in further if fusion.name not in (*encoded[0], *added)]
    words = [_describe_samples(kind, sample_set, number) for kind, sample_set in samples.items()]
    words[0] += how
    if cut := sum(processor.cut[: samples.get("text", _NOTHING).total or 0]):  # of the user's texts
        words[0] += f", {cut} cut to {processor.length} tokens"
    words += [f"random {', '.join(added)}"] if added else []
    built_in = any(sample_set.total is None for sample_set in samples.values())
    origin: Literal["file", "sample", "random"] = "random" if added else "sample" if built_in else "file"
    return GeneratedInputs(batches=completed, origin=origin, detail="; ".join(words))


_NOTHING = SampleSet((), 0)


def _samples(processor: Processor, kind: str, request: InputRequest) -> SampleSet:
    name = request["files"].get(kind)
    path = None if name is None else Path(name)
    if kind == "text":
        return texts(path)
    return images(path) if kind == "images" else sounds(path, processor.sampling_rate())


def _describe_samples(kind: str, samples: SampleSet, number: int) -> str:
    noun = kind.removesuffix("s")
    if samples.total is None:
        return f"built-in {noun} samples"
    used = f"{number} of " if number < samples.total else ""
    return f"{samples.name}: {used}{plural(samples.total, f'{noun} sample')}"


def _complete(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add random tensors for missing inputs, and drop those that the model does not accept."""
    accepts = inspect.signature(model.forward).parameters.keys()
    rows = next((len(tensor) for tensor in tensors.values()), _RANDOM_ROWS)
    inputs = {name: tensor for name, tensor in tensors.items() if name in accepts}
    for name in needed_inputs(model):
        if name not in inputs:
            inputs[name] = random_input(model, name, rows)
            if name == "input_ids" and "attention_mask" in accepts:
                inputs["attention_mask"] = torch.ones_like(inputs[name])
    if any(words in type(model).__name__ for words in ("MultipleChoice", "DoubleHeads")):
        return {name: tensor[None] for name, tensor in inputs.items()}  # the rows are choices
    return inputs


def _fuse_all(model: Any, batches: list[dict[str, Tensor]]) -> tuple[list[dict[str, Tensor]], list[Fusion]]:
    """Add images and audio to text batches for models that fuse them."""
    additions = find_fusions(model, batches[0])
    for fusion in additions:
        batches = [fuse(batch, fusion) for batch in batches]
    return batches, additions


def read_inputs(file: Path) -> list[dict[str, Tensor]]:
    """Read the batches that a sandbox has written.

    Raises:
        InputError: The file holds something that ``generate_inputs`` never returns.
    """
    batches: dict[int, dict[str, Tensor]] = {}
    for key, tensor in map_checkpoint(file).tensors.items():
        index, _, name = key.partition(".")
        finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        if not index.isdecimal() or not name.isidentifier() or tensor.dtype not in _DTYPES or not finite:
            raise InputError(f"the processor makes {describe(name)} of {tensor.dtype}", hint=OWN_INPUTS)
        batches.setdefault(int(index), {})[name] = tensor.clone()  # the file will be removed
    return [batches[index] for index in sorted(batches)]


def resize_batches(
    batches: Sequence[Mapping[str, Tensor]], special: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Batch, ...]:
    """Resize batches: repeat or truncate rows to ``batch``, and tokens or audio samples to ``length``.

    Tokens up to the last of the ``special`` ones, which are placeholders, stay unchanged.

    Raises:
        UsageError: The inputs have no such axis, or the length leaves no room for text after an image.
    """
    names = {  # an input named like a waveform may be a spectrogram
        name
        for batch in batches
        for name in _SEQUENCES
        if name in batch and (name != "input_values" or batch[name].dim() == 2)
    }
    axes = ["length", "batch"] if names else ["batch"]
    for axis in sizes:
        if axis not in axes:
            raise unknown_axis(axis, axes, "")
    resized = []
    for batch in batches:
        tensors = dict(batch)
        rows = len(next(batch[name] for name in (*_SEQUENCES, *batch) if name in batch))
        fixed = _prefix_length(batch, special)
        for name, tensor in batch.items():
            if "length" in sizes and name in names:
                start = fixed if name in _WITH_PLACEHOLDERS else 0
                tensors[name] = _at_length(tensor, start, sizes["length"])
            if "batch" in sizes:  # a row may have several patches
                per_row = max(1, len(tensor) // rows)
                tensors[name] = _repeated_along(tensors[name], 0, sizes["batch"] * per_row)
        resized.append(Batch((), tensors))
    return tuple(resized)


def _prefix_length(batch: Mapping[str, Tensor], special: Sequence[int]) -> int:
    """Return the number of tokens up to and including the last placeholder."""
    ids = batch.get("input_ids", torch.empty(0, 0, dtype=torch.int64))
    places = torch.isin(ids, torch.tensor(special, dtype=torch.int64)).nonzero()
    return int(places[:, -1].max()) + 1 if len(places) else 0


def _at_length(tensor: Tensor, fixed: int, size: int) -> Tensor:
    if fixed and not fixed < min(size, tensor.shape[-1]):
        hint = f"give lengths of more than {fixed}, or pass --inputs with an example_inputs(length)"
        raise UsageError(f"a length of {size} has no room for a text after its picture or sound", hint=hint)
    text = _repeated_along(tensor[..., fixed:], -1, size - fixed)
    return torch.cat([tensor[..., :fixed], text], -1)


def _repeated_along(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])


def check_ids(model: Any, batches: Iterable[dict[str, Tensor]]) -> None:
    """Reject token ids for which a model has no embedding.

    Raises:
        InputError: The tokenizer belongs to another model.
    """
    config = model.config
    for batch in batches:
        for name, decoder in (("input_ids", False), ("decoder_input_ids", True)):
            vocabulary = getattr(text_config(config, decoder=decoder), "vocab_size", None)
            ids = batch.get(name)
            if ids is None or not ids.numel() or not isinstance(vocabulary, int):
                continue
            special = torch.tensor(placeholders(config), dtype=torch.int64)
            ids = ids[~torch.isin(ids, special)]  # some are beyond the vocabulary
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise InputError(
                    f"the tokenizer gives token {int(ids.max()):,}; the model has {vocabulary:,}",
                    hint=f"put the model's own tokenizer beside it, or {OWN_INPUTS}",
                )


@dataclass(frozen=True, slots=True)
class Fusion:
    """The inputs of a modality, and the placeholder tokens that its features replace in the text."""

    name: str  # of the main input
    sizes: tuple[int, ...]  # of the main input, which is random; empty if the batches contain it
    others: Mapping[str, Tensor]  # further inputs by name
    token: int  # id of a placeholder
    kind: int  # value of the placeholders in ``mm_token_type_ids``
    max_tokens: int | None  # limit of a row
    count: int = 0  # of placeholders in each row


_Layouts = Iterator[tuple[tuple[int, ...], dict[str, Tensor]]]  # sizes of the main input, and other inputs


@dataclass(frozen=True, slots=True)
class _Modality:
    """The names that Transformers uses for a modality; see also ``Fusion``."""

    name: str
    tokens: tuple[str, ...]  # settings that may hold the placeholder
    method: str  # returns features
    kind: int
    # candidate inputs for a model, its input names and a number of rows; usual ones first
    layouts: Callable[[Any, Collection[str], int], _Layouts]


def find_fusions(model: Any, batch: Mapping[str, Tensor]) -> list[Fusion]:
    """Return the modalities that can be added to batches like this one.

    Configurations do not say how many placeholders an image takes. So a copy of the model without weights
    computes the features, which are counted, and runs until they are merged into the text embeddings.
    """
    parameters, additions = inspect.signature(model.forward).parameters.keys(), list[Fusion]()
    for modality in _MODALITIES:
        token = first_setting(model.config, modality.tokens, None)
        applicable = type(token) is int and modality.name in parameters and "input_ids" in batch
        if applicable and not bool((batch["input_ids"] == token).any()):
            fusion = _accepted_fusion(without_data(model, nn.Module.eval), modality, token, batch)
            if fusion is not None:
                additions.append(fusion)
                batch = fuse(batch, fusion)
    return additions


def fuse(batch: Mapping[str, Tensor], fusion: Fusion) -> dict[str, Tensor]:
    """Add the inputs of a modality to a batch, and its placeholders before the text."""
    tensors = {**batch, **fusion.others}
    if fusion.sizes:
        tensors[fusion.name] = torch.randn(fusion.sizes)
    firsts = {"attention_mask": 1, "input_ids": fusion.token, "mm_token_type_ids": fusion.kind}
    for name, first in {**firsts, "token_type_ids": 0}.items():
        if name in tensors:
            placeholders = tensors[name].new_full((len(tensors[name]), fusion.count), first)
            tensors[name] = torch.cat([placeholders, tensors[name]], 1)[:, : fusion.max_tokens]
    return tensors


def _accepted_fusion(
    model: nn.Module, modality: _Modality, token: int, batch: Mapping[str, Tensor]
) -> Fusion | None:
    """Return the first layout that a model without weights accepts."""
    parameters = inspect.signature(model.forward).parameters.keys()
    # the method of the model or of a submodule that computes features
    methods = (getattr(module, modality.method, None) for module in model.modules())
    method = next((m for m in methods if m and modality.name in inspect.signature(m).parameters), None)
    names = parameters if method is None else inspect.signature(method).parameters.keys()
    layouts: _Layouts = iter([((), {})])
    if modality.name not in batch:
        layouts = modality.layouts(model, names, len(batch["input_ids"]))
    with contextlib.suppress(InputError):  # absurd sizes in a configuration
        limit = max_tokens(model.config)
        for sizes, others in layouts:
            accepted = {name: tensor for name, tensor in others.items() if name in names}
            if "mm_token_type_ids" in parameters and "mm_token_type_ids" not in batch:
                accepted["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
            fusion = Fusion(modality.name, sizes, accepted, token, modality.kind, limit)
            with contextlib.suppress(Exception):  # models reject inputs in many ways
                return _with_token_count(model, method, names, batch, fusion)
    return None


def _with_token_count(
    model: nn.Module,
    method: Callable[..., Any] | None,
    names: Collection[str],
    batch: Mapping[str, Tensor],
    fusion: Fusion,
) -> Fusion:
    """Set the number of placeholders of a fusion.

    The exceptions of a model that rejects the inputs are passed on.
    """
    with MetaRun(), torch.no_grad():
        if method is not None:
            arguments = {name: tensor for name, tensor in fuse(batch, fusion).items() if name in names}
            total = _feature_count(method(**arguments))
            fusion = replace(fusion, count=total // len(batch["input_ids"]))
        complete = fuse(batch, fusion)
        with contextlib.suppress(_EmbeddingsReached), _stop_at_embeddings(model, complete["input_ids"].shape):
            model(**complete)
    return fusion


class _EmbeddingsReached(Exception):
    """Raised when the language model is called with the merged embeddings; the rest of the run is skipped."""


@contextlib.contextmanager
def _stop_at_embeddings(model: nn.Module, sizes: torch.Size) -> Iterator[None]:
    """Raise ``_EmbeddingsReached`` before a submodule is called with embeddings of all tokens."""

    def stop(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is not None and embeddings.shape[:2] == sizes:
            raise _EmbeddingsReached

    hooks = [module.register_forward_pre_hook(stop, with_kwargs=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _feature_count(features: Any) -> int:
    """Return the number of features in a tensor, or in a list with a tensor per image."""
    if not isinstance(features, Tensor | list | tuple):
        features = first_setting(features, ("pooler_output", "last_hidden_state"), ())
    tensors = [features] if isinstance(features, Tensor) else features
    return sum(math.prod(tensor.shape[:-1]) for tensor in tensors)


def _pictures(model: Any, names: Collection[str], rows: int) -> _Layouts:
    """Yield images as patches with positions, as a whole, or in tiles."""
    vision = part_with(model.config, ("vision_config",), "patch_size")
    *_, channels, height, width = input_sizes(model, "pixel_values", rows)
    if _PATCHES & set(names):
        yield from _patches(vision, channels, rows)
        return
    for h, w in dict.fromkeys([(min(height, _USUAL_SIDE), min(width, _USUAL_SIDE)), (height, width)]):
        others = {"image_sizes": torch.tensor([[h, w]] * rows)}
        yield (rows, channels, h, w), others
        for tiles in range(1, _MAX_TILES + 1):
            yield (rows, tiles, channels, h, w), others
        max_tiles = first_setting(vision, ("max_num_tiles",), 1)
        sizes = check_sizes("pixel_values", rows, 1, max_tiles, channels, h, w)
        ratios = {
            "aspect_ratio_ids": torch.ones(rows, 1),
            "aspect_ratio_mask": torch.ones(rows, 1, max_tiles),
        }
        yield sizes, {name: tensor.long() for name, tensor in ratios.items()}


def _patches(vision: Any, channels: int, rows: int) -> _Layouts:
    patch, frames = (first_setting(vision, (name,), 1) for name in ("patch_size", "temporal_patch_size"))
    (*_, height, width), number = check_sizes("pixel_values", frames, channels, patch, patch), _SIDE * _SIDE
    size = channels * height * width
    places = torch.cartesian_prod(torch.arange(_SIDE), torch.arange(_SIDE))
    others = {
        "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]] * rows),
        "image_grid_hw": torch.tensor([[_SIDE, _SIDE]] * rows),
        "image_position_ids": places.repeat(rows, 1, 1),
        "pixel_attention_mask": torch.ones(rows, number, dtype=torch.long),
        "spatial_shapes": torch.tensor([[_SIDE, _SIDE]] * rows),
    }
    yield (rows * number, frames * size), others
    yield (rows * number, channels, height, width), others
    yield (rows, number, size), others


def _spectrograms(model: Any, names: Collection[str], rows: int) -> _Layouts:
    sizes = input_sizes(model, "input_features", rows)
    yield sizes, {}
    mask = torch.ones(rows, sizes[-1], dtype=torch.long)
    yield sizes, {"feature_attention_mask": mask, "input_features_mask": mask}


_MODALITIES = (
    _Modality("pixel_values", IMAGE_TOKENS, "get_image_features", 1, _pictures),
    _Modality("input_features", AUDIO_TOKENS, "get_audio_features", 3, _spectrograms),
)


class ValuesNeeded(Exception):
    """Raised when code depends on values computed from weights."""


class MetaRun(TorchDispatchMode):
    """Computes the values of CPU tensors, and only the shapes of ops on a ``meta`` tensor.

    A model without weights thus runs code that reads a number of patches, token positions or a mask.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            if kwargs.get("device") == torch.device("meta") and func is not _aten.empty.memory_format:
                kwargs = kwargs | {"device": "cpu"}
            return func(*args, **kwargs)
        dynamic = any(tag in func.tags for tag in _DATA_DEPENDENT_TAGS)
        if func is _aten.index.Tensor:
            indices = [part for index in args[1] for part in _as_indices(index)]
            args = (args[0], indices)
            dynamic = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        mutated = written_values(func, args, kwargs)
        if dynamic or any(isinstance(value, Tensor) and not value.is_meta for value in mutated):
            raise ValuesNeeded(str(func))
        if func is _aten.embedding.default and not args[1].is_meta:
            table, rows = args[:2]
            # as the real kernel
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(table):
                raise IndexError(f"row {int(rows.max())} of an embedding with {len(table)}")
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _as_indices(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Convert a mask with known values to indices per axis; return other indices unchanged."""
    if index is None or index.is_meta or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return index.nonzero().unbind(1)
