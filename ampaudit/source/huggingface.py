"""Loads a Hugging Face model directory: config.json and safetensors, without network or remote code."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.core.config import SourceConfig
from ampaudit.core.errors import InputError, SourceError
from ampaudit.source.inputs import functions_of, inputs_from
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch, ModelSource
from ampaudit.source.user_code import calling_user_code

__all__ = ["from_directory"]

_BATCH, _LENGTH = 2, 32


def from_directory(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Load the model of a directory in FP32, with inputs from --inputs or suitable random ones.

    Raises:
        SourceError: transformers is not installed, or the directory holds no loadable model.
        InputError: the kind of input is unknown; pass --inputs.
    """
    configuration = path / "config.json"
    if not configuration.is_file():
        raise SourceError(f"{path} has no config.json", hint="give a Hugging Face model directory")
    try:
        import transformers
    except ImportError as error:
        raise SourceError(
            "Hugging Face directories need the transformers package",
            hint="pip install 'ampaudit[transformers]'",
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    architecture = _architecture(configuration, transformers)
    model = _empty(path, architecture) if options.stream else _load(path, architecture)
    functions = functions_of()
    if options.inputs:
        batches, functions = inputs_from(options.inputs, options.batches, options.seed)
    else:
        torch.manual_seed(options.seed + INPUT_SEED_OFFSET)
        batches = tuple(_random_batch(model) for _ in range(options.batches))
    digest = hashlib.sha256(configuration.read_bytes()).hexdigest()
    return ModelSource(location, "huggingface", model, batches, digest, **functions)


def _architecture(configuration: Path, transformers: Any) -> Any:
    try:
        names = json.loads(configuration.read_text(encoding="utf-8")).get("architectures") or []
    except (ValueError, AttributeError) as error:
        raise SourceError(f"{configuration}: not valid JSON: {error}", hint="restore the file") from error
    for name in names:
        found = getattr(transformers, str(name), None)
        if found is not None:
            return found
    if names:
        raise SourceError(
            f"{configuration}: architecture {names[0]!r} is not in this version of transformers",
            hint="update transformers; code that ships with a model directory is never run",
        )
    return transformers.AutoModel


def _load(path: Path, architecture: Any) -> nn.Module:
    with calling_user_code(f"{path}"):
        model = architecture.from_pretrained(
            path, local_files_only=True, dtype=torch.float32, use_safetensors=True
        )
    assert isinstance(model, nn.Module)
    return model


def _empty(path: Path, architecture: Any) -> nn.Module:
    """Build the model of a configuration without weights, which stay on disk."""
    import transformers

    with calling_user_code(f"{path}"):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        maker = (
            architecture.from_config if hasattr(architecture, "from_config") else architecture._from_config
        )
        model = maker(config, dtype=torch.float32)
    assert isinstance(model, nn.Module)
    return model.eval()


def _random_batch(model: Any) -> Batch:
    """Return random token ids or pixels of the configured sizes."""
    config, name = model.config, getattr(model, "main_input_name", "input_ids")
    if name == "input_ids":
        vocabulary = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
        longest = getattr(config, "max_position_embeddings", None) or _LENGTH
        ids = torch.randint(0, vocabulary, (_BATCH, min(_LENGTH, longest)))
        kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = ids.clone()
        return Batch((), kwargs)
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return Batch((), {"pixel_values": torch.randn(_BATCH, channels, height, width)})
    raise InputError(
        f"cannot make example inputs for main input {name!r}",
        hint="pass --inputs FILE.py with example_inputs()",
    )
