"""Builds the model of a configuration without weights; in a sandbox first, to see that it can be built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from safetensors.torch import save_file
from torch import nn
from typing_extensions import TypedDict

from ampaudit.core.errors import AuditError, InputError, SourceError
from ampaudit.core.text import format_bytes
from ampaudit.source.made_inputs import InputRequest, MadeInputs, make_inputs
from ampaudit.source.model_config import CONFIG_FILE
from ampaudit.source.processor import copy_processor

__all__ = [
    "INPUTS_FILE",
    "Rehearsed",
    "configured",
    "empty_model",
    "named_architecture",
    "named_class",
    "rehearse",
]

INPUTS_FILE = "inputs.safetensors"
_MAX_INPUTS = 200_000_000  # bytes; less than a sandbox may write to a file


class Rehearsed(TypedDict):
    """What is known of a model before its weights are read.

    Attributes:
        name: of its class.
        size: bytes in float32.
        origin: of its inputs; empty if none were asked for, or they could not be made.
        detail: describes them, or the problem.
        hint: what to do about the problem.
    """

    name: str
    size: Annotated[int, Ge(0), Le(1 << 80)]
    origin: Literal["", "file", "sample", "random"]
    detail: str
    hint: str


def rehearse(request: dict[str, Any]) -> Callable[[], Rehearsed]:
    """Return the function that a sandbox calls in its folder, where inputs are left in a file.

    Args:
        request: ``table``, a configuration; ``directory``, with the files of a processor; and ``inputs``, an
            ``InputRequest`` or nothing.
    """
    table, inputs = request["table"], request["inputs"]
    architecture = named_architecture(table)

    def work() -> Rehearsed:
        config = configured(architecture, table, Path.cwd())
        with torch.device("meta"):
            model = empty_model(architecture, config)
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
        size = sum(t.numel() * (4 if t.is_floating_point() else t.itemsize) for t in tensors)
        found = Rehearsed(name=type(model).__name__, size=size, origin="", detail="", hint="")
        if inputs is not None:
            try:
                made = _saved_inputs(model, inputs, Path(request["directory"]))
                found["origin"], found["detail"] = made["origin"], made["detail"]
            except AuditError as error:
                found["detail"], found["hint"] = str(error.args[0]), error.hint
        return found

    return work


def _saved_inputs(model: Any, request: InputRequest, directory: Path) -> MadeInputs:
    copy_processor(directory, Path.cwd())
    made = make_inputs(model, request, Path.cwd())
    named = {f"{i}.{name}": t for i, batch in enumerate(made["batches"]) for name, t in batch.items()}
    size = sum(tensor.nbytes for tensor in named.values())
    if size > _MAX_INPUTS:
        raise InputError(f"inputs of {format_bytes(size)} are too large", hint="lower --batches")
    save_file({name: tensor.contiguous().clone() for name, tensor in named.items()}, INPUTS_FILE)
    return made


def named_architecture(table: dict[str, Any]) -> Any:
    """Return the class that a configuration names, or ``AutoModel`` if it names none.

    Raises:
        SourceError: Transformers has no such model.
    """
    import transformers

    found, names = named_class(table), table.get("architectures") or []
    if found is None and names:
        raise SourceError(
            f"architecture {names[0]!r} is not in this version of transformers",
            hint="update transformers; code that ships with a model directory runs only with --trust",
        )
    return found or transformers.AutoModel


def named_class(table: dict[str, Any]) -> Any:
    """Return the first model class of Transformers that a configuration names, or ``None``."""
    import transformers

    for name in table.get("architectures") or []:
        found = getattr(transformers, str(name), None)
        base = transformers.PreTrainedModel
        if isinstance(found, type) and issubclass(found, base) and found is not base:
            return found
    return None


def configured(architecture: Any, table: dict[str, Any], folder: Path) -> Any:
    """Return the configuration that Transformers makes of a table.

    Args:
        architecture: the model's class.
        table: see ``read_model_config``.
        folder: an empty one, of which Transformers reads nothing else.
    """
    import transformers

    (folder / CONFIG_FILE).write_text(json.dumps(table), encoding="utf-8")
    kind = getattr(architecture, "config_class", None) or transformers.AutoConfig
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def empty_model(architecture: Any, config: Any, *, trust: bool = False) -> nn.Module:
    """Build a model without weights, on the device and under the context that are set."""
    if hasattr(architecture, "from_config"):
        model = architecture.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    else:
        model = architecture._from_config(config, dtype=torch.float32)
    assert isinstance(model, nn.Module)
    return model
