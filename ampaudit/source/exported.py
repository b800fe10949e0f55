"""Opens an exported program (``.pt2``) as a traceable model."""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import fx, nn
from torch.utils import _pytree as pytree
from typing_extensions import TypedDict

from ampaudit.checkpoint.archive import Archive
from ampaudit.checkpoint.pickled import read_plain_data
from ampaudit.core.errors import AuditError, InputError, SourceError, first_line
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe, describe_path, parse_json, validate
from ampaudit.report.model import InputsInfo
from ampaudit.source.inputs import functions_of, inputs_from
from ampaudit.source.interface import Batch, BatchFactory, ModelSource
from ampaudit.source.pt2.graph import build_graph, read_tensors, weight_of
from ampaudit.source.pt2.schema import PROGRAM_SCHEMA
from ampaudit.trace.fake_model import place_tensor
from ampaudit.trace.replay import REPLAYED, Replayer

_MAX_JSON = 96_000_000  # bytes; some 2,000 per op
_SCHEMA_VERSION = 8
# of the archive; others must lie in these folders
_MEMBERS = (
    "archive_format",
    "archive_version",
    "byteorder",
    ".data/version",
    ".data/serialization_id",
    "version",
)
_FOLDERS = ("models", "data/weights", "data/constants", "data/sample_inputs")
_EXTRA = "extra/"  # texts that the user added; they are not read
_TRUST = "export it again with this version of PyTorch, or pass --trust to run what it contains"
_SEQUENCES: Mapping[str, type] = {
    "builtins.tuple": tuple,
    "builtins.list": list,
    "collections.deque": deque,
    "collections.namedtuple": tuple,
}
_MAPPINGS: Mapping[str, type] = {
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": dict,
}
_TREESPEC_VERSION = 1


def from_exported(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Open the program of a ``.pt2`` file, with inputs from --inputs or its own example inputs.

    Raises:
        SourceError: The file is missing, corrupt, without inputs, or holds content that only code could read.
    """
    if not path.is_file():
        raise SourceError(f"no such file: {path}", hint="check the path of the .pt2 file")
    program = _load_trusted(path) if options.trust else read_program(path)
    functions, model = functions_of(), ExportedModel(program)
    make_batches: BatchFactory | None = None
    if options.inputs:
        make_batches, functions, info = inputs_from(options, model, same_model=False)
        batches = make_batches(options.input_sizes or {})
    elif program.example is not None:
        args, kwargs = program.example
        batches, info = (Batch(tuple(args), dict(kwargs)),), InputsInfo("stored", "inputs of the export")
    else:
        raise SourceError(f"{path} holds no example inputs", hint="pass --inputs FILE.py")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ModelSource(
        location, "pt2", model, batches, digest, inputs=info, make_batches=make_batches, **functions
    )


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
    call = program.call_spec
    assert call.out_spec is not None
    return StoredProgram(module, call.in_spec, call.out_spec, program.example_inputs, program.state_dict)


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
                f"the inputs do not have the structure of the program's: {error}",
                hint="pass inputs like those of the export",
            ) from error
        outputs = replayer.run(*inputs, enable_io_processing=False)
        return pytree.tree_unflatten(list(outputs), self._outputs)

    def train(self, mode: bool = True) -> ExportedModel:
        """Set the mode of this module only; that of an exported graph is fixed."""
        self.training = mode
        return self


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """An exported program, and the structure of its inputs and outputs."""

    graph: fx.GraphModule  # takes a flat list of inputs, and holds the weights as attributes
    inputs: pytree.TreeSpec  # of the arguments and keyword arguments
    outputs: pytree.TreeSpec
    example: tuple[tuple[Any, ...], dict[str, Any]] | None
    weights: Mapping[str, torch.Tensor]  # parameters and buffers by the model's names


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
    member = f"models/{name}.json"
    document = parse_json(archive.read(member, _MAX_JSON))
    program = validate(PROGRAM_SCHEMA, document, Path(archive.path, member), SourceError, _TRUST)
    major = program["schema_version"]["major"]
    if major != _SCHEMA_VERSION:
        raise ValueError(f"its schema has version {major}; this version of ampaudit reads {_SCHEMA_VERSION}")
    module = program["graph_module"]
    weights = read_tensors(archive, "data/weights/", f"{name}_weights_config.json")
    constants = read_tensors(archive, "data/constants/", f"{name}_constants_config.json")
    specs = module["signature"]["input_specs"]
    stored = [place for spec in specs if (place := weight_of(spec)) is not None]
    root = nn.Module()
    for kind, path in stored:
        tensor = weights.get(path, constants.get(path))
        if tensor is None:
            raise ValueError(f"the values of {describe(path)!r} are missing")
        place_tensor(root, path, tensor if kind == "parameter" else tensor.detach())
    call = module["module_call_graph"][0]["signature"] if module["module_call_graph"] else None
    if call is None:
        raise ValueError("its call signature is missing")
    inputs = read_structure(call["in_spec"], output=False)
    outputs = read_structure(call["out_spec"], output=True)
    shape = [child.type for child in inputs.children()] if inputs.type is tuple else []
    input_count = sum(weight_of(spec) is None for spec in specs)
    output_count = sum("user_output" in spec for spec in module["signature"]["output_specs"])
    if shape != [tuple, dict] or (inputs.num_leaves, outputs.num_leaves) != (input_count, output_count):
        raise ValueError("the structure of its inputs or outputs does not match its graph")
    graph = build_graph(root, module["graph"], specs, module["signature"]["output_specs"])
    for _, path in stored:
        if path not in weights:  # a constant; building the graph module has made it persistent
            owner, _, leaf = path.rpartition(".")
            holder = graph.get_submodule(owner)
            tensor = holder.get_buffer(leaf)
            delattr(holder, leaf)
            holder.register_buffer(leaf, tensor, persistent=False)
    return StoredProgram(graph, inputs, outputs, _example(archive, name), weights)


def _model_in(archive: Archive) -> str:
    """Return the name of the program, after checking that the archive holds nothing else."""
    for member in archive.members:
        folder = str(PurePosixPath(member).parent)
        if member not in _MEMBERS and folder not in _FOLDERS and not member.startswith(_EXTRA):
            raise SourceError(
                f"{describe_path(archive.path)}: holds {describe(member)!r}, which is not part of a program",
                hint=_TRUST,
            )
    names = [
        m.removeprefix("models/").removesuffix(".json") for m in archive.members if m.startswith("models/")
    ]
    if "archive_format" not in archive.members or archive.read("archive_format", 10) != b"pt2" or not names:
        raise ValueError("it is not in the format of torch.export.save (PyTorch 2.7 or later)")
    return "model" if "model" in names else names[0]


def _example(archive: Archive, name: str) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    member = f"data/sample_inputs/{name}.pt"
    if member not in archive.members or not archive.members[member].size:
        return None
    example = read_plain_data(Archive(Path(archive.path, member), SourceError, archive.mapped(member)))
    if example is None:
        return None
    args, kwargs = example if isinstance(example, tuple) and len(example) == 2 else (None, None)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict) or set(map(type, kwargs)) - {str}:
        raise ValueError("its example inputs are not arguments and keyword arguments")
    return tuple(args), kwargs


class _Spec(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]
    type: Annotated[str, Field(max_length=1_000)] | None
    context: Any
    children_spec: list[_Spec]


_SPEC = TypeAdapter(_Spec)
_KEYS = TypeAdapter(list[str | int], config=ConfigDict(strict=True))


def read_structure(text: str, *, output: bool) -> pytree.TreeSpec:
    """Parse the JSON of ``torch.utils._pytree.treespec_dumps``: a version, and the nested containers.

    In outputs, a container of another class becomes a dict of its fields, or a tuple. Inputs must consist of
    Python's own containers.

    Raises:
        ValueError: The text is malformed, or holds a container that only code could build.
    """
    document = parse_json(text)
    if not isinstance(document, list) or len(document) != 2 or document[0] != _TREESPEC_VERSION:
        raise ValueError(f"the structure of its {'outputs' if output else 'inputs'} is not readable")
    try:
        return _spec(_SPEC.validate_python(document[1]), output)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"the structure of its values: {describe(fault['msg'])}") from error


def flatten(value: Any, structure: pytree.TreeSpec) -> list[Any]:
    """Return the leaves of a value in the order of a structure; sequence types are interchangeable.

    Raises:
        ValueError: The value has another structure.
    """
    if structure.is_leaf():
        return [value]
    children = structure.children()
    if structure.type in _SEQUENCES.values():
        fits = isinstance(value, tuple | list | deque) and len(value) == len(children)
        items = list(value) if fits else []
    else:
        fits = isinstance(value, Mapping) and set(value) == set(structure.context)
        items = [value[key] for key in structure.context] if fits else []
    if not fits:
        what = "keys" if structure.type in _MAPPINGS.values() else "values"
        raise ValueError(f"a {structure.type.__name__} with {len(children)} {what} is expected")
    return [leaf for item, child in zip(items, children, strict=True) for leaf in flatten(item, child)]


def _spec(spec: _Spec, output: bool) -> pytree.TreeSpec:
    kind, children = spec["type"], [_spec(child, output) for child in spec["children_spec"]]
    if kind is None:
        if children:
            raise ValueError("a leaf has children")
        return pytree.treespec_leaf()
    if kind in _SEQUENCES:
        return pytree.TreeSpec(_SEQUENCES[kind], None, children)
    keys = _keys(spec["context"])
    if kind in _MAPPINGS or output:
        if keys is not None and len(keys) == len(children):
            return pytree.TreeSpec(_MAPPINGS.get(kind, dict), keys, children)
        if kind not in _MAPPINGS:
            return pytree.TreeSpec(tuple, None, children)
        raise ValueError("a dict does not have as many keys as values")
    raise ValueError(f"it takes an object of the class {describe(kind)!r}")


def _keys(context: Any) -> list[str | int] | None:
    """Return the keys of a dict or the field names of an object, if the context has them."""
    if isinstance(context, str):
        try:
            context = parse_json(context)
        except ValueError:
            return None
    if isinstance(context, dict):  # a defaultdict
        context = context.get("dict_context")
    try:
        keys = _KEYS.validate_python(context)
    except ValidationError:
        return None
    return keys if len(set(keys)) == len(keys) else None
