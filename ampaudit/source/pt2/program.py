"""Reads an exported program as a model, from an archive of JSON and raw bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ampaudit.checkpoint.archive import Archive
from ampaudit.checkpoint.pickled import read_plain_data
from ampaudit.core.errors import AuditError, SourceError, first_line
from ampaudit.core.untrusted import describe, describe_path, parse_json, validate
from ampaudit.source.pt2.graph import build_graph, weight_of
from ampaudit.source.pt2.schema import PROGRAM_SCHEMA, ProgramFile, Signature
from ampaudit.source.pt2.structure import read_structure
from ampaudit.source.pt2.tensors import read_tensors

__all__ = ["StoredProgram", "read_program"]

_MAX_JSON = 96_000_000  # bytes; some 2,000 per op
_MAJOR = 8
_READ = (
    "archive_format",
    "archive_version",
    "byteorder",
    ".data/version",
    ".data/serialization_id",
    "version",
)
_FOLDERS = ("models", "data/weights", "data/constants", "data/sample_inputs")
_EXTRA = "extra/"  # texts added by the user, which are not read
_TRUST = "export it again with this version of PyTorch, or pass --trust to run what it contains"


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """An exported program.

    Attributes:
        graph: Module that takes a flat list of inputs and holds the weights as attributes.
        inputs: Nesting of the arguments and keyword arguments.
        outputs: Nesting of the outputs.
        example: Example arguments and keyword arguments; ``None`` if the file has none.
        weights: Parameters and buffers by the model's names.
    """

    graph: fx.GraphModule
    inputs: pytree.TreeSpec
    outputs: pytree.TreeSpec
    example: tuple[tuple[Any, ...], dict[str, Any]] | None
    weights: Mapping[str, torch.Tensor]


def read_program(path: Path) -> StoredProgram:
    """Read a program without running code from its file.

    Raises:
        SourceError: The file is missing, corrupt, or has content that only code could read: pickled objects,
            libraries, operators of another package.
    """
    try:
        return _read(Archive(path, SourceError))
    except AuditError:
        raise
    except (ValueError, KeyError, RuntimeError, RecursionError, SyntaxError) as error:
        raise SourceError(
            f"{describe_path(path)}: not a readable exported program: {describe(first_line(error), 150)}",
            hint=_TRUST,
        ) from error


def _read(archive: Archive) -> StoredProgram:
    name = _model_in(archive)
    program = _parse(archive, f"models/{name}.json")
    module = program["graph_module"]
    weights = read_tensors(archive, "data/weights/", f"{name}_weights_config.json")
    constants = read_tensors(archive, "data/constants/", f"{name}_constants_config.json")
    specs = module["signature"]["input_specs"]
    root = nn.Module()
    for spec in specs:
        if (stored := weight_of(spec)) is not None:
            _attach(root, *stored, _tensor(stored[1], weights, constants))
    call = module["module_call_graph"][0]["signature"] if module["module_call_graph"] else None
    if call is None:
        raise ValueError("it does not tell how it is called")
    inputs, outputs = (
        read_structure(call["in_spec"], output=False),
        read_structure(call["out_spec"], output=True),
    )
    _check_structure(inputs, outputs, module["signature"])
    graph = build_graph(root, module["graph"], specs, module["signature"]["output_specs"])
    for spec in specs:
        stored = weight_of(spec)
        if stored is not None and stored[1] not in weights:
            _leave_out_of_state_dict(graph, stored[1])
    return StoredProgram(graph, inputs, outputs, _example(archive, name), weights)


def _check_structure(inputs: pytree.TreeSpec, outputs: pytree.TreeSpec, signature: Signature) -> None:
    """Check that the nesting of inputs and outputs fits the graph."""
    shape = [child.type for child in inputs.children()] if inputs.type is tuple else []
    input_count = sum(weight_of(spec) is None for spec in signature["input_specs"])
    output_count = sum("user_output" in spec for spec in signature["output_specs"])
    if shape != [tuple, dict] or (inputs.num_leaves, outputs.num_leaves) != (input_count, output_count):
        raise ValueError("the nesting of its inputs or outputs does not fit its graph")


def _model_in(archive: Archive) -> str:
    """Return the name of the program, after checking that the archive holds nothing else."""
    for member in archive.members:
        folder = str(PurePosixPath(member).parent)
        if member not in _READ and folder not in _FOLDERS and not member.startswith(_EXTRA):
            raise SourceError(
                f"{describe_path(archive.path)}: holds {describe(member)!r}, which is no part of a program",
                hint=_TRUST,
            )
    names = [
        m.removeprefix("models/").removesuffix(".json") for m in archive.members if m.startswith("models/")
    ]
    if "archive_format" not in archive.members or archive.read("archive_format", 10) != b"pt2" or not names:
        raise ValueError("it is not in the format of torch.export.save (PyTorch 2.7 or later)")
    return "model" if "model" in names else names[0]


def _parse(archive: Archive, member: str) -> ProgramFile:
    text = archive.read(member, _MAX_JSON)
    program = validate(PROGRAM_SCHEMA, parse_json(text), Path(archive.path, member), SourceError, _TRUST)
    major = program["schema_version"]["major"]
    if major != _MAJOR:
        raise ValueError(f"its schema has version {major}; this version of ampaudit reads {_MAJOR}")
    return program


def _tensor(name: str, *tables: Mapping[str, torch.Tensor]) -> torch.Tensor:
    for table in tables:
        if name in table:
            return table[name]
    raise ValueError(f"the values of {describe(name)!r} are missing")


def _attach(root: nn.Module, kind: str, path: str, tensor: torch.Tensor) -> None:
    """Set a parameter, buffer or constant of a module under its dotted name."""
    owner = root
    *parents, leaf = path.split(".")
    for part in parents:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        child = owner._modules[part]
        assert child is not None
        owner = child
    if kind == "parameter" and isinstance(tensor, nn.Parameter):
        owner.register_parameter(leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor.detach())


def _leave_out_of_state_dict(module: nn.Module, path: str) -> None:
    """Make a buffer non-persistent, as constants are; building a graph module has made it persistent."""
    owner, _, leaf = path.rpartition(".")
    place = module.get_submodule(owner)
    tensor = place.get_buffer(leaf)
    delattr(place, leaf)
    place.register_buffer(leaf, tensor, persistent=False)


def _example(archive: Archive, name: str) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    member = f"data/sample_inputs/{name}.pt"
    if member not in archive.members or not archive.members[member].size:
        return None
    inner = Archive(Path(archive.path, member), SourceError, archive.mapped(member))
    example = read_plain_data(inner)
    if example is None:
        return None
    args, kwargs = example if isinstance(example, tuple) and len(example) == 2 else (None, None)
    if not (
        isinstance(args, tuple | list)
        and isinstance(kwargs, dict)
        and all(isinstance(k, str) for k in kwargs)
    ):
        raise ValueError("its example inputs are not arguments and keyword arguments")
    return tuple(args), kwargs
