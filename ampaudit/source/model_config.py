"""Reads the config.json of a model directory, and drops references to code, kernels and other files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter

from ampaudit.core.errors import SourceError
from ampaudit.core.source_config import CONFIG_FILE
from ampaudit.core.untrusted import describe, describe_path, read_json, validate

MAX_CONFIG = 16_000_000  # bytes
ADAPTER = "adapter_config.json"
PIPELINE = "model_index.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_MAX_ARCHITECTURES = 16
_CLASS = re.compile(r"[A-Z][A-Za-z0-9_]{0,99}")
_IMPLEMENTATION = re.compile(r"(paged\|)?[a-z0-9_]{1,40}")
_DTYPES = {"float16", "bfloat16", "float32", "float64", "half", "float", "double", "auto"}
# keys through which Transformers loads code or other files, and keys that the model does not need
_DROPPED = {
    "_name_or_path", "auto_map", "base_model_name_or_path", "custom_generate", "custom_pipelines",
    "kernel_config", "name_or_path", "quantization_config", "use_kernels",
}  # fmt: skip
# quantization methods that store float8 weights and scales
_FLOAT8_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt", "mxfp8")
QUANTIZED_HINT = "pass --trust to scan it with its package; to convert it, save it with dequantized weights"

_Size = Annotated[int, Field(ge=1, le=1 << 32)]
_Block = Annotated[tuple[_Size, _Size], BeforeValidator(lambda v: v.split("x") if isinstance(v, str) else v)]


class _QuantizedWeights(BaseModel):
    block_structure: _Block | None = None


class _Group(BaseModel):
    weights: _QuantizedWeights | None = None


class Quantization(BaseModel):
    """The ``quantization_config`` of a model; ``config_groups`` is the form of compressed-tensors."""

    quant_method: str
    weight_block_size: _Block | None = None
    config_groups: dict[str, _Group] | None = None

    @property
    def block(self) -> tuple[int, int] | None:
        """The size of the blocks with one scale each; ``None`` if weights differ or have no blocks."""
        groups = (self.config_groups or {}).values()
        blocks = {group.weights.block_structure if group.weights else None for group in groups}
        return blocks.pop() if len(blocks) == 1 else self.weight_block_size


_QUANTIZATION = TypeAdapter(Quantization)


def read_model_config(directory: Path) -> dict[str, Any]:
    """Read a configuration, without the keys that name code or other files.

    Raises:
        SourceError: See ``read_raw_config``; or the configuration names a kernel, other files or an
            unsupported quantization, or the directory holds an adapter.
    """
    table = read_raw_config(directory)
    if (directory / ADAPTER).exists():
        raise SourceError(
            f"{describe_path(directory)} holds an adapter ({ADAPTER}), which names its own base model",
            hint="merge the adapter into the model with PEFT's merge_and_unload, or pass --trust",
        )
    names = table.get("architectures") or []
    if not isinstance(names, list) or len(names) > _MAX_ARCHITECTURES:
        raise _config_error(directory, "architectures is not a short list", "restore the file")
    for name in names:
        if not isinstance(name, str) or not _CLASS.fullmatch(name):
            what = f"architecture {describe(name)!r} is not a class name"
            raise _config_error(directory, what, "restore the file")
    cleaned: dict[str, Any] = _without_references(directory, table, "")
    return cleaned


def read_quantization(directory: Path) -> Quantization | None:
    """Read the quantization of a model's weights; ``None`` if they are not quantized.

    Raises:
        SourceError: See ``read_raw_config``; or the quantization is not supported.
    """
    entry = next(_quantization_entries(read_raw_config(directory)), None)
    if entry is None:
        return None
    if (problem := _quantization(entry)) is not None:
        raise _config_error(directory, f"quantization_config {problem}", QUANTIZED_HINT)
    return validate(_QUANTIZATION, entry, directory / CONFIG_FILE, SourceError, "restore the file")


def _quantization_entries(table: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the quantizations of a configuration and of the configurations nested in it."""
    for key, value in table.items():
        if key == "quantization_config" and value:
            yield value
        elif isinstance(value, dict):
            yield from _quantization_entries(value)


def with_stored_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration with another dtype, nested ones included, and without a quantization."""

    def changed(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return with_stored_dtype(value, dtype)
        is_dtype = key in ("dtype", "torch_dtype") and (value is None or isinstance(value, str))
        return dtype if is_dtype else value

    return {key: changed(key, value) for key, value in config.items() if key != "quantization_config"}


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Read a configuration as it is.

    Raises:
        SourceError: The file is missing, too large, or not a JSON object.
    """
    path = directory / CONFIG_FILE
    if not path.exists():
        raise SourceError(
            f"{describe_path(directory)} has no {CONFIG_FILE}", hint="give a Hugging Face model directory"
        )
    table = read_json(path, MAX_CONFIG, SourceError, "restore the file", finite=False)
    if not isinstance(table, dict):
        raise _config_error(directory, "not a JSON object", "restore the file")
    return table


def _without_references(directory: Path, value: Any, place: str) -> Any:
    """Drop the keys that refer to code or other files, at any depth."""
    if isinstance(value, list):
        return [_without_references(directory, item, place) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{place}{key}"
        check = _CHECKS.get(key)
        problem = check(item) if check is not None and item is not None else None
        if key.startswith("__") and key != "__float__":
            problem = "is not the name of a setting"
        if problem is not None:
            trust = "edit the file, or read its code and pass --trust"
            hint = QUANTIZED_HINT if key == "quantization_config" else trust
            raise _config_error(directory, f"{describe(name)} {problem}", hint)
        if key not in _DROPPED:
            cleaned[key] = _without_references(directory, item, f"{name}.")
    return cleaned


def _implementation(value: Any) -> str | None:
    names = list(value.values()) if isinstance(value, dict) else [value]
    for name in names:
        if name is not None and not (isinstance(name, str) and _IMPLEMENTATION.fullmatch(name)):
            return f"names a kernel that would be loaded: {describe(name)!r}"
    return None


def _dtype(value: Any) -> str | None:
    is_float = isinstance(value, str) and value.removeprefix("torch.") in _DTYPES
    return None if is_float else f"is not a floating-point type: {describe(value)!r}"


def _quantization(value: Any) -> str | None:
    method = value.get("quant_method") if isinstance(value, dict) else value
    if not value or (isinstance(value, dict) and method in _FLOAT8_METHODS):
        return None
    methods = f"{', '.join(_FLOAT8_METHODS[:-1])} and {_FLOAT8_METHODS[-1]}"
    return f"asks for a quantization, {describe(method)!r}; only float8 weights of {methods} are dequantized"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "_attn_implementation": _implementation,
    "_attn_implementation_internal": _implementation,
    "_experts_implementation": _implementation,
    "_experts_implementation_internal": _implementation,
    "attn_implementation": _implementation,
    "configuration_files": lambda value: "names other files to read instead" if value else None,
    "dtype": _dtype,
    "experts_implementation": _implementation,
    "quantization_config": _quantization,
    "torch_dtype": _dtype,
    "transformers_weights": lambda value: (
        None if value in _WEIGHTS else f"names other weights: {describe(value)!r}"
    ),
}


def _config_error(directory: Path, what: str, hint: str) -> SourceError:
    return SourceError(f"{describe_path(directory / CONFIG_FILE)}: {what}", hint=hint)
