"""Loads a Hugging Face model directory: config.json and safetensors, without network or remote code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from pydantic import TypeAdapter
from torch import nn

from ampaudit.checkpoint.header import FLOAT_TYPES
from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.checkpoint.open import open_checkpoint, weights_in
from ampaudit.core.config import SourceConfig
from ampaudit.core.errors import AuditError, InputError, SourceError, first_line
from ampaudit.core.files import temporary_directory
from ampaudit.core.sandbox import Sandbox, SandboxLimits
from ampaudit.core.text import format_bytes
from ampaudit.core.untrusted import describe, describe_path, read_bounded, validate
from ampaudit.source.inputs import functions_of, inputs_from
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch, ModelSource
from ampaudit.source.model_config import CONFIG_FILE, MAX_CONFIG, read_model_config, read_raw_config
from ampaudit.source.rehearsal import configured, empty_model, named_architecture, named_class
from ampaudit.source.user_code import calling_user_code

__all__ = ["from_directory"]

_BATCH, _LENGTH = 2, 32
_MAX_PIXELS = 1 << 26  # values of a batch of random images
_SLACK = 256_000_000  # bytes of a head without weights, or of tables that the model computes
_ANSWER = TypeAdapter(tuple[str, Annotated[int, Ge(0), Le(1 << 80)]])
_LIMITS = SandboxLimits(seconds=120, memory=500_000_000, processor_seconds=5)


def from_directory(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Load the model of a directory in FP32, with inputs from --inputs or suitable random ones.

    Raises:
        SourceError: transformers is not installed, or the directory holds no loadable model.
        InputError: the kind of input is unknown; pass --inputs.
        WeightsError: see ``open_checkpoint``.
    """
    model = _trusted(path, options) if options.trust else _untrusted(path, options)
    functions = functions_of()
    if options.inputs:
        batches, functions = inputs_from(options.inputs, options.batches, options.seed)
    else:
        torch.manual_seed(options.seed + INPUT_SEED_OFFSET)
        batches = tuple(_random_batch(model) for _ in range(options.batches))
    digest = hashlib.sha256(read_bounded(path / CONFIG_FILE, MAX_CONFIG, SourceError)).hexdigest()
    return ModelSource(location, "huggingface", model, batches, digest, **functions)


def _untrusted(path: Path, options: SourceConfig) -> nn.Module:
    """Build the model from a checked configuration, once a sandbox could, and give it checked weights.

    Transformers never sees the directory itself.
    """
    table = read_model_config(path)
    _check_installed()
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with Sandbox("ampaudit.source.rehearsal:rehearse", table, _LIMITS, environment) as sandbox:
        transformers = _transformers()
        named_class(table)  # imports it, as the sandbox does at the same time
        what = describe_path(path / CONFIG_FILE)
        answer = sandbox.answer(what, SourceError, "restore the file")
    name, size = validate(_ANSWER, answer, path / CONFIG_FILE, SourceError, "restore the file")
    weights = options.weights if options.stream and options.weights is not None else weights_in(path)
    _check_size(path, size, weights)
    table["architectures"] = [name]
    architecture = named_architecture(table)
    with _loading(path), _offline(), temporary_directory("ampaudit-config-") as folder:
        config = configured(architecture, table, folder)
        if options.stream:
            return empty_model(architecture, config).eval()
        # the method of the base class: some classes read further files
        load = transformers.PreTrainedModel.from_pretrained.__func__
        tensors = map_checkpoint(weights).tensors
        model = load(architecture, None, config=config, state_dict=tensors, dtype=torch.float32)
    assert isinstance(model, nn.Module)
    return model


def _check_size(path: Path, size: int, weights: Path) -> None:
    """Reject a configuration of a model that is much larger than the weights beside it."""
    entries = open_checkpoint(weights).entries.values()
    stored = sum(4 * entry.elements for entry in entries if entry.dtype in FLOAT_TYPES)
    if size > 2 * stored + _SLACK:
        raise SourceError(
            f"{describe_path(path / CONFIG_FILE)}: describes a model of {format_bytes(size)}; "
            f"its weights are {format_bytes(stored)} in float32",
            hint="give the directory of one model, with all of its weights",
        )


def _trusted(path: Path, options: SourceConfig) -> nn.Module:
    """Load the model as Transformers does, with the code in the directory."""
    table = read_raw_config(path)
    _check_installed()
    transformers = _transformers()
    print(f"ampaudit: --trust: transformers may run code of {describe_path(path)}", file=sys.stderr)
    with calling_user_code(f"{path}"):
        architecture = _own_class(table, transformers)
        if options.stream:
            config = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=True
            )
            return empty_model(architecture, config, trust=True).eval()
        model = architecture.from_pretrained(
            path, local_files_only=True, trust_remote_code=True, dtype=torch.float32, use_safetensors=True
        )
    assert isinstance(model, nn.Module)
    return model


def _own_class(table: dict[str, Any], transformers: Any) -> Any:
    """Return the class of Transformers, or the one that loads the directory's own class."""
    named = named_class(table)
    if named is not None:
        return named
    own = table.get("auto_map") or {}
    classes = table.get("architectures") or [""]
    loaders = [name for name in own if name.startswith("AutoModel") and hasattr(transformers, name)]
    loaders.sort(key=lambda name: not str(own[name]).endswith(f".{classes[0]}"))
    return getattr(transformers, loaders[0] if loaders else "AutoModel")


def _check_installed() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise SourceError(
            "Hugging Face directories need the transformers package",
            hint="pip install 'ampaudit[transformers]'",
        )


def _transformers() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Report errors of Transformers as those of the directory."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except AuditError:
        raise
    except Exception as error:
        what = f"Transformers cannot load it: {type(error).__name__}: {describe(first_line(error), 120)}"
        if "ignore_mismatched_sizes" in str(error):
            what = f"the weights have other shapes than {CONFIG_FILE} describes"
        hint = "restore the directory: configuration and weights must be of one model"
        raise SourceError(f"{describe_path(path)}: {what}", hint=hint) from error


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let nothing ask the Hub while active, as in the sandbox."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _random_batch(model: Any) -> Batch:
    """Return random token ids or pixels of the configured sizes."""
    config, name = model.config, getattr(model, "main_input_name", "input_ids")
    if name == "input_ids":
        vocabulary = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
        longest = getattr(config, "max_position_embeddings", None) or _LENGTH
        _check_sizes(vocab_size=vocabulary, max_position_embeddings=longest)
        ids = torch.randint(0, vocabulary, (_BATCH, min(_LENGTH, longest)))
        kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = ids.clone()
        return Batch((), kwargs)
    if name == "pixel_values":
        size: Any = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
        channels = getattr(config, "num_channels", 3)
        _check_sizes(image_size=height, width=width, num_channels=channels)
        if _BATCH * channels * height * width > _MAX_PIXELS:
            raise InputError(
                f"example inputs of {channels} x {height} x {width} pixels are too large",
                hint="pass --inputs FILE.py with example_inputs()",
            )
        return Batch((), {"pixel_values": torch.randn(_BATCH, channels, height, width)})
    raise InputError(
        f"cannot make example inputs for main input {name!r}",
        hint="pass --inputs FILE.py with example_inputs()",
    )


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size < 1 << 31:
            raise InputError(
                f"{CONFIG_FILE}: {name} is {describe(size)}, not a size",
                hint="restore the file, or pass --inputs FILE.py with example_inputs()",
            )
