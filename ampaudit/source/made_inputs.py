"""Makes inputs for a model directory: from the user's files, from built-in samples, or at random."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.core.errors import AuditError, InputError, UsageError, first_line
from ampaudit.core.text import plural
from ampaudit.core.untrusted import describe
from ampaudit.source.fused_inputs import Fusion, fused, fusions
from ampaudit.source.inputs import unknown_axis
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch
from ampaudit.source.processor import KINDS, Processor
from ampaudit.source.random_inputs import OWN_INPUTS, needed_inputs, placeholders, random_input, text_config
from ampaudit.source.samples import SampleSet, images, sounds, texts

__all__ = ["InputRequest", "MadeInputs", "at_sizes", "check_ids", "make_inputs", "read_inputs"]

_ROWS = {"text": 4, "images": 2, "audio": 2}  # of a batch
_RANDOM_ROWS = 2
_MAX_BATCHES = 16  # of files, unless a number is given
_SEQUENCES = (  # whose last axis is that of tokens or samples
    *("input_ids", "inputs", "attention_mask", "token_type_ids", "decoder_input_ids"),
    *("decoder_attention_mask", "input_values", "mm_token_type_ids"),
)
_WITH_PLACEHOLDERS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_DTYPES = (torch.int64, torch.float32, torch.bool)


class InputRequest(TypedDict):
    """What to make inputs of: the user's files by kind; the number of batches, and a seed."""

    files: dict[str, str]
    batches: int | None
    seed: int


class MadeInputs(TypedDict):
    """Batches, and where they come from: ``file``, ``sample`` or ``random``, and in words."""

    batches: list[dict[str, Tensor]]
    origin: Literal["file", "sample", "random"]
    detail: str


def make_inputs(model: Any, request: InputRequest, folder: Path, *, trust: bool = False) -> MadeInputs:
    """Make batches of a model's inputs.

    Args:
        model: on any device.
        request: see ``InputRequest``.
        folder: with ``config.json`` and the files of the processor.
        trust: whether code in the folder may run.

    Raises:
        InputError: a file cannot be used, or there is no way to make these inputs.
    """
    torch.manual_seed(request["seed"] + INPUT_SEED_OFFSET)
    processor = Processor(model, folder, trust=trust)
    for kind in request["files"]:
        _check(model, processor, kind)
    problem = processor.problem
    if processor.parts:
        try:
            return _processed(model, processor, request)
        except Exception as error:
            problem = describe(f"its processor failed: {type(error).__name__}: {first_line(error)}", 200)
            if isinstance(error, AuditError):
                raise
            if request["files"]:
                raise InputError(problem, hint=OWN_INPUTS) from error
    made, _ = _fused(model, [_completed(model, {}) for _ in range(request["batches"] or 1)])
    return MadeInputs(batches=made, origin="random", detail=f"random {', '.join(made[0])}: {problem}")


def _check(model: Any, processor: Processor, kind: str) -> None:
    if not processor.takes(kind):
        needs = ", ".join(needed_inputs(model))
        raise InputError(f"--{kind}: {type(model).__name__} takes none", hint=f"its inputs are {needs}")
    if kind not in processor.parts:
        hint = f"copy its files beside the model, or {OWN_INPUTS}"
        raise InputError(f"--{kind}: {processor.problem}", hint=hint)


def _processed(model: Any, processor: Processor, request: InputRequest) -> MadeInputs:
    samples = {kind: _samples(processor, kind, request) for kind in KINDS if kind in processor.parts}
    total = max((found.total or 0 for found in samples.values()), default=0)
    rows, batches = min(_ROWS[kind] for kind in samples), request["batches"] or 1
    if total:
        batches = min(-(-total // rows), request["batches"] or _MAX_BATCHES)
        rows = min(rows, total)
    columns = {kind: _repeated(found, rows * batches) for kind, found in samples.items()}
    chat = any(isinstance(item, list) for item in columns.get("text", ()))
    if chat and not processor.has_chat_template():
        raise InputError("--text: the tokenizer has no chat template", hint="write texts, not messages")
    templated = samples.get("text", _NOTHING).total is None and processor.has_chat_template()
    how = " in the chat template" if chat or templated else ""
    try:
        made = processor.encoded(columns, rows, chat=chat or templated)
    except Exception as error:
        if chat or not templated or type(error).__name__ == "SecurityError":  # of Jinja
            raise
        how = " without the chat template, which fails"  # some take only what has a picture, or tools
        made = processor.encoded(columns, rows, chat=False)
    completed, further = _fused(model, [_completed(model, tensors) for tensors in made])
    added = [name for name in needed_inputs(model) if name not in made[0]]
    added += [fusion.name for fusion in further if fusion.name not in (*made[0], *added)]
    words = [_described(kind, found, rows * batches) for kind, found in samples.items()]
    words[0] += how
    if cut := sum(processor.cut[: samples.get("text", _NOTHING).total or 0]):  # of the user's texts
        words[0] += f", {cut} cut to {processor.length} tokens"
    words += [f"random {', '.join(added)}"] if added else []
    origin: Literal["file", "sample", "random"]
    built_in = any(found.total is None for found in samples.values())
    origin = "random" if added else "sample" if built_in else "file"
    return MadeInputs(batches=completed, origin=origin, detail="; ".join(words))


_NOTHING = SampleSet((), 0)


def _samples(processor: Processor, kind: str, request: InputRequest) -> SampleSet:
    given = request["files"].get(kind)
    path = None if given is None else Path(given)
    if kind == "text":
        return texts(path)
    return images(path) if kind == "images" else sounds(path, processor.sampling_rate())


def _repeated(samples: SampleSet, number: int) -> list[Any]:
    """Return so many samples; from the first again where there are fewer."""
    found: Iterable[Any] = samples.items
    return list(islice(cycle(islice(found, number)), number))


def _described(kind: str, samples: SampleSet, number: int) -> str:
    noun = kind.removesuffix("s")
    if samples.total is None:
        return f"built-in {noun} samples"
    used = f"{number} of " if number < samples.total else ""
    return f"{samples.name}: {used}{plural(samples.total, f'{noun} sample')}"


def _completed(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add at random what is missing, and leave out what the model does not take."""
    accepts = inspect.signature(model.forward).parameters.keys()
    rows = next((len(tensor) for tensor in tensors.values()), _RANDOM_ROWS)
    found = {name: tensor for name, tensor in tensors.items() if name in accepts}
    for name in needed_inputs(model):
        if name not in found:
            found[name] = random_input(model, name, rows)
            if name == "input_ids" and "attention_mask" in accepts:
                found["attention_mask"] = torch.ones_like(found[name])
    if any(words in type(model).__name__ for words in ("MultipleChoice", "DoubleHeads")):
        return {name: tensor[None] for name, tensor in found.items()}  # the rows are choices
    return found


def _fused(model: Any, batches: list[dict[str, Tensor]]) -> tuple[list[dict[str, Tensor]], list[Fusion]]:
    """Add the modalities that a model puts into texts, where it takes them."""
    found = fusions(model, batches[0])
    for fusion in found:
        batches = [fused(batch, fusion) for batch in batches]
    return batches, found


def read_inputs(file: Path) -> list[dict[str, Tensor]]:
    """Read the batches that a sandbox left in a file.

    Raises:
        InputError: they are not what ``make_inputs`` makes.
    """
    batches: dict[int, dict[str, Tensor]] = {}
    for key, tensor in map_checkpoint(file).tensors.items():
        index, _, name = key.partition(".")
        finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        if not index.isdecimal() or not name.isidentifier() or tensor.dtype not in _DTYPES or not finite:
            raise InputError(f"the processor makes {describe(name)} of {tensor.dtype}", hint=OWN_INPUTS)
        batches.setdefault(int(index), {})[name] = tensor.clone()  # the file will be removed
    return [batches[index] for index in sorted(batches)]


def at_sizes(
    batches: Sequence[Mapping[str, Tensor]], special: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Batch, ...]:
    """Repeat or cut rows to a ``batch``, and tokens or samples of sound to a ``length``.

    Args:
        batches: as a directory's inputs are made.
        special: see ``placeholders``; tokens up to the last of these are kept as they are.
        sizes: by the name of an axis.

    Raises:
        UsageError: the inputs have no such axis, or a text of this length has no room for its picture.
    """
    names = {n for n in _SEQUENCES for batch in batches if n in batch and not _is_picture(n, batch[n])}
    axes = ["length", "batch"] if names else ["batch"]
    for axis in sizes:
        if axis not in axes:
            raise unknown_axis(axis, axes, "")
    made = []
    for batch in batches:
        tensors = dict(batch)
        rows = len(next(batch[name] for name in (*_SEQUENCES, *batch) if name in batch))
        fixed = _fixed(batch, special)
        for name, tensor in batch.items():
            if "length" in sizes and name in names:
                start = fixed if name in _WITH_PLACEHOLDERS else 0
                tensors[name] = _at_length(tensor, start, sizes["length"])
            if "batch" in sizes:  # a row may have several patches
                per_row = max(1, len(tensor) // rows)
                tensors[name] = _repeated_along(tensors[name], 0, sizes["batch"] * per_row)
        made.append(Batch((), tensors))
    return tuple(made)


def _fixed(batch: Mapping[str, Tensor], special: Sequence[int]) -> int:
    """Return the number of tokens up to the last placeholder."""
    ids = batch.get("input_ids", torch.empty(0, 0, dtype=torch.int64))
    places = torch.isin(ids, torch.tensor(special, dtype=torch.int64)).nonzero()
    return int(places[:, -1].max()) + 1 if len(places) else 0


def _at_length(tensor: Tensor, fixed: int, size: int) -> Tensor:
    if fixed and not fixed < min(size, tensor.shape[-1]):
        hint = f"give lengths of more than {fixed}, or pass --inputs with an example_inputs(length)"
        raise UsageError(f"a length of {size} has no room for a text after its picture or sound", hint=hint)
    text = _repeated_along(tensor[..., fixed:], -1, size - fixed)
    return torch.cat([tensor[..., :fixed], text], -1)


def _is_picture(name: str, tensor: Tensor) -> bool:
    """Return whether it is a spectrogram under the name of a sound."""
    return name == "input_values" and tensor.dim() != 2


def _repeated_along(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])


def check_ids(model: Any, batches: Iterable[dict[str, Tensor]]) -> None:
    """Reject token ids for which a model has no embedding.

    Raises:
        InputError: the tokenizer is another model's.
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
