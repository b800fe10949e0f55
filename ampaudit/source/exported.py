"""Loads an exported program (``.pt2``) as a model that can be traced again."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from ampaudit.core.config import SourceConfig
from ampaudit.core.errors import SourceError, first_line
from ampaudit.source.inputs import functions_of, inputs_from
from ampaudit.source.interface import Batch, ModelSource
from ampaudit.trace.internals import Replacement, patched
from ampaudit.trace.replay import REPLAYED, Replayer

__all__ = ["from_exported", "load_program"]


def from_exported(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Load the program of a ``.pt2`` file, with inputs from --inputs or its own example inputs.

    Raises:
        SourceError: missing, corrupt, without inputs, or with pickled objects (which are not loaded).
    """
    if not path.is_file():
        raise SourceError(f"no such file: {path}", hint="check the path of the .pt2 file")
    program = load_program(path)
    module = _module_of(program)
    functions = functions_of()
    if options.inputs:
        batches, functions = inputs_from(options.inputs, options.batches, options.seed)
    elif program.example_inputs is not None:
        args, kwargs = program.example_inputs
        batches = (Batch(tuple(args), dict(kwargs)),)
    else:
        raise SourceError(f"{path} holds no example inputs", hint="pass --inputs FILE.py")
    assert isinstance(module, fx.GraphModule)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = ExportedModel(module, _keyword_order(program))
    return ModelSource(location, "pt2", model, batches, digest, **functions)


def _module_of(program: ExportedProgram) -> nn.Module:
    """Return the program as a module, without guards on its inputs if torch can omit them."""
    try:
        return program.module(check_guards=False)
    except TypeError:
        return program.module()


def _keyword_order(program: ExportedProgram) -> tuple[str, ...]:
    keywords = program.call_spec.in_spec.children()[1]
    return tuple(str(name) for name in keywords.context or ())


def load_program(path: Path) -> ExportedProgram:
    """Load a program with every pickle restricted to tensors; torch itself would run code in them.

    Raises:
        SourceError: corrupt, or with pickled objects.
    """
    load = torch.load

    def tensors_only(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **(kwargs | {"weights_only": True}))

    def refused(*_: Any, **__: Any) -> Any:
        raise pickle.UnpicklingError("a custom object")

    try:
        with patched(
            (
                Replacement(torch, "load", tensors_only),
                Replacement(torch._C, "_pickle_load_obj", refused),
            )
        ):
            return torch.export.load(path)
    except pickle.UnpicklingError as error:
        raise SourceError(
            f"{path}: holds Python objects that would run code when loaded; refused",
            hint="export the model again with torch.export.save and plain tensors",
        ) from error
    except Exception as error:
        raise SourceError(
            f"{path}: not a readable exported program: {first_line(error)}",
            hint="save it with torch.export.save",
        ) from error


class ExportedModel(nn.Module):
    """Replays an exported program with the signature of its model."""

    def __init__(self, program: fx.GraphModule, order: tuple[str, ...]) -> None:
        super().__init__()
        setattr(self, REPLAYED, program)
        self._order = order

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, with keyword inputs in the order of the export."""
        ordered = [kwargs[name] for name in self._order]
        return Replayer(getattr(self, REPLAYED)).run(*args, *ordered)

    def train(self, mode: bool = True) -> ExportedModel:
        """Set the flag of this module only; the mode of an exported graph is fixed."""
        self.training = mode
        return self
