"""Copies the other files of a Hugging Face directory, and sets the dtype in its config."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from ampaudit.audit.advice.residual_stream import AttributeChange
from ampaudit.checkpoint.header import MANIFEST, PLAN, REPORT
from ampaudit.core.errors import SourceError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.untrusted import open_regular
from ampaudit.export.weight_files import StorageDecision
from ampaudit.source.model_config import CONFIG_FILE, read_raw_config, with_stored_dtype
from ampaudit.trace.fake_model import kept_by_author
from ampaudit.trace.values import torch_dtype

__all__ = ["copy_companions", "set_dtype", "set_numbers"]

# weights in any format: those of the source would contradict ours
_WEIGHTS = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".pt2", ".gguf", ".ot"),
    *(".tflite", ".data", ".npz", ".mlmodel"),
}
_NAMES = {MANIFEST, PLAN, REPORT}


def copy_companions(source: Path, target: Path, output: Path) -> None:
    """Copy configuration, tokenizer and everything else except weights, with subdirectories.

    Args:
        source: Model directory.
        target: Directory to copy to.
        output: Directory of the conversion, which is not copied if it lies within the source.

    Raises:
        SourceError: A link leads out of the source, so that its copy would publish another file.
    """
    inside = [source.resolve()]
    if inside[0].parent.name == "snapshots":  # the cache of Hugging Face, whose files are links
        inside.append(inside[0].parent.parent / "blobs")
    for path in sorted(source.rglob("*")):
        if path.resolve().is_relative_to(output.resolve()):
            continue
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or not path.is_file() or path.suffix in _WEIGHTS or path.name.endswith(".index.json"):
            continue
        if str(relative) in _NAMES:
            continue
        place = target / relative
        if not any(path.resolve().is_relative_to(directory) for directory in inside):
            raise SourceError(
                f"{path} is a link to {path.resolve()}, outside of the model's directory",
                hint="put the file itself there, or remove the link",
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(path, SourceError), "rb") as file, place.open("xb") as copy:
            shutil.copyfileobj(file, copy)


def set_dtype(
    directory: Path, model: nn.Module, decisions: Mapping[str, StorageDecision], dtype: str
) -> tuple[str, ...]:
    """Set the dtype in config.json so that ``from_pretrained`` loads the planned dtypes.

    It loads all parameters in one dtype, except for modules that the model's class keeps in FP32. The dtype
    is the 16-bit format only if the plan stores all other parameters in it.

    Returns:
        Notes for the user.
    """
    path = directory / CONFIG_FILE
    config = read_raw_config(directory)
    float32 = _in_float32(model, decisions, dtype)
    if "torch_dtype" not in config:
        config.setdefault("dtype")
    config = with_stored_dtype(config, dtype if not float32 else "float32")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not float32:
        return ()
    return (
        f"from_pretrained has one dtype for the whole model and loads this directory in float32, since "
        f"{len(float32)} tensors stay in it: run it under torch.autocast, or use model.pt2; --policy half or "
        "keep-fp32-modules makes a directory that loads in 16 bits",
    )


def set_numbers(directory: Path, model: nn.Module, changes: Collection[AttributeChange]) -> bool:
    """Set numbers of modules, such as an eps, in config.json; return whether that covers all of them.

    A number is set only if exactly one key has it, and every module with this number changes.
    """
    path, config = directory / CONFIG_FILE, read_raw_config(directory)
    values = {(each.old, each.new) for each in changes}
    if len(values) != 1:
        return not values
    ((old, new),) = values
    keys = [key for key, value in config.items() if value == old and isinstance(value, float)]
    holding = {
        (path, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value == new
    }
    still = any(
        isinstance(value, float) and value == old
        for module in model.modules()
        for value in vars(module).values()
    )
    if len(keys) != 1 or still or holding != {(each.module, each.name) for each in changes}:
        return False
    config[keys[0]] = new
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _in_float32(model: nn.Module, decisions: Mapping[str, StorageDecision], dtype: str) -> list[str]:
    listed = kept_by_author(model, torch_dtype(low_precision_format(dtype)))
    return [
        name
        for name, decision in decisions.items()
        if decision.dtype == "F32" and not listed(decision.parameter or name)
    ]
