"""Opens an exported program (``.pt2``) as a traceable model."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, SourceError, first_line
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe, describe_path
from ampaudit.report.inputs import InputsInfo
from ampaudit.source.inputs import functions_of, inputs_from
from ampaudit.source.interface import Batch, ModelSource, Sized
from ampaudit.source.pt2.program import StoredProgram, read_program
from ampaudit.source.pt2.structure import flatten
from ampaudit.trace.replay import REPLAYED, Replayer

__all__ = ["ExportedModel", "from_exported"]


def from_exported(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Open the program of a ``.pt2`` file, with inputs from --inputs or its own example inputs.

    Raises:
        SourceError: The file is missing, corrupt, without inputs, or holds content that only code could read.
    """
    if not path.is_file():
        raise SourceError(f"no such file: {path}", hint="check the path of the .pt2 file")
    program = _load_trusted(path) if options.trust else read_program(path)
    functions, model = functions_of(), ExportedModel(program)
    sized: Sized | None = None
    if options.inputs:
        sized, functions, info = inputs_from(options, model, same_model=False)
        batches = sized(options.input_sizes or {})
    elif program.example is not None:
        args, kwargs = program.example
        batches, info = (Batch(tuple(args), dict(kwargs)),), InputsInfo("stored", "inputs of the export")
    else:
        raise SourceError(f"{path} holds no example inputs", hint="pass --inputs FILE.py")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ModelSource(location, "pt2", model, batches, digest, inputs=info, sized=sized, **functions)


def _load_trusted(path: Path) -> StoredProgram:
    """Load a program with torch, which runs code from the file."""
    print(f"ampaudit: --trust: torch.export.load may run code of {describe_path(path)}", file=sys.stderr)
    try:
        program = torch.export.load(path)
        module = program.module(check_guards=False)
    except Exception as error:
        raise SourceError(
            f"{describe_path(path)}: torch cannot load it: {describe(first_line(error), 150)}",
            hint="save it with torch.export.save",
        ) from error
    assert isinstance(module, fx.GraphModule)
    example = program.example_inputs
    assert program.call_spec.out_spec is not None
    return StoredProgram(
        module, program.call_spec.in_spec, program.call_spec.out_spec, example, program.state_dict
    )


class ExportedModel(nn.Module):
    """Replays an exported program with the signature of its model."""

    def __init__(self, program: StoredProgram) -> None:
        super().__init__()
        setattr(self, REPLAYED, program.graph)
        self._inputs, self._outputs = program.inputs, program.outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        replayer = Replayer(getattr(self, REPLAYED))
        try:
            inputs = flatten((args, kwargs), self._inputs)
        except ValueError as error:
            raise InputError(
                f"the inputs are not nested as the program's: {error}",
                hint="pass inputs like those that it was exported with",
            ) from error
        outputs = replayer.run(*inputs, enable_io_processing=False)
        return pytree.tree_unflatten(list(outputs), self._outputs)

    def train(self, mode: bool = True) -> ExportedModel:
        """Set the mode of this module only; that of an exported graph is fixed."""
        self.training = mode
        return self
