"""Wraps a model as a module that takes and returns flat tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ampaudit.trace.isolation import host_state
from ampaudit.trace.replay import INSERTED, REPLAYED, replaying
from ampaudit.trace.state import PythonState, StateChange, value_key
from ampaudit.trace.values import CASTABLE_DTYPES, tensors_in

ENTRY_NAME = "audited_model"
_EXPORT_ROOT = "_export_root"  # torch.export's own wrapper, while it traces
_MAX_DEPTH = 12
_NUMBERS = (int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
_LEAVES = (str, bytes, *_NUMBERS, nn.Module, type)
Around = Callable[[], AbstractContextManager[None]]


class LossAndOutput(NamedTuple):
    """The result of a model that also computes its loss."""

    loss: torch.Tensor
    output: Any


class OutputNames:
    """The results of one call of the model; an object, because torch.export undoes attribute assignments."""

    names: tuple[str, ...] = ()  # path of each output tensor
    paths: Mapping[str, int] = {}  # every path in the output, with the number of its tensor
    structure: OutputStructure | None = None  # structure of the output; ``None`` if it cannot be rebuilt
    changes: tuple[StateChange, ...] = ()  # changes of the model's Python state
    random_constants: bool = False  # whether random numbers of Python or NumPy became constants of the trace


@dataclass(frozen=True, slots=True)
class OutputStructure:
    """The structure of a model's result without its tensors."""

    spec: pytree.TreeSpec  # containers that torch can flatten
    # for each leaf the index of its tensor, or ``None`` and the value itself
    leaves: tuple[tuple[int | None, Any], ...]

    @property
    def has_objects(self) -> bool:
        """Whether tensors are in an object that torch cannot take apart."""
        return holds_objects(self.spec)

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Fill the structure with other tensors."""
        leaves = [value if index is None else tensors[index] for index, value in self.leaves]
        return restored(pytree.tree_unflatten(leaves, self.spec))


class Entry(nn.Module):
    """Calls the model with the batch's structure and returns the tensors of its output.

    Non-tensor inputs are fixed at tracing time. Outputs may be tensors in any nesting of tuples, lists,
    dicts, dataclasses (``ModelOutput``) or objects such as key-value caches. Floating-point outputs except
    float64 are cast to ``output_dtype``, if any. The model's code runs in the context that ``around`` makes;
    ``begin`` is called with the input tensors before it, and ``then`` with the model and its output after it.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output_dtype: torch.dtype | None = None,
        around: Around = nullcontext,
        then: Callable[[nn.Module, Any], None] | None = None,
        begin: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        super().__init__()
        setattr(self, ENTRY_NAME, model)
        self._around = around
        self._then = then
        self._begin = begin
        self._output_dtype = output_dtype
        if hasattr(model, "output_dtype"):  # a model with its loss has its own outputs inside
            vars(model)["output_dtype"] = output_dtype
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        first: dict[int, int] = {}  # a tensor passed twice is one in the trace: code may ask whether q is k
        self._same = [
            first.setdefault(id(leaves[index]), number) for number, index in enumerate(self._positions)
        ]
        self.outputs = OutputNames()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take tensors in the order of ``tensor_leaves``; return those of ``outputs.names``."""
        if self._begin is not None:
            self._begin(tensors)
        leaves = list(self._fixed)
        for index, number in zip(self._positions, self._same, strict=True):
            leaves[index] = tensors[number]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        model = getattr(self, ENTRY_NAME)
        buffers = [
            (path, vars(module)["_buffers"], dict(module._buffers)) for path, module in model.named_modules()
        ]
        state, random_state = PythonState(model), host_state()
        with self._around():
            output = model(*restored(args), **restored(kwargs))
        self.outputs.random_constants = host_state() != random_state
        reshaped = [name for path, now, then in buffers for name in _write_assigned(path, now, then)]
        self.outputs.changes = (
            *state.changes(),
            *(StateChange(-1, name, None, None, False) for name in reshaped),
        )
        named_outputs = flatten_outputs(output)
        self.outputs.names = tuple(name for name, _ in named_outputs)
        # an object may make a tensor anew whenever it is asked for it, under the same name
        numbers = {key: n for n, (name, tensor) in enumerate(named_outputs) for key in (name, id(tensor))}
        every = flatten_outputs(output, once=False)
        self.outputs.paths = {
            name: numbers[name if name in numbers else id(tensor)] for name, tensor in every
        }
        self.outputs.structure = _structure(output, [tensor for _, tensor in named_outputs])
        outputs = tuple(placed(tensor, self._output_dtype) for _, tensor in named_outputs)
        if self._then is not None:
            self._then(model, output)
        return outputs


def _write_assigned(path: str, now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Copy tensors assigned to buffers into them, as torch.export does for the outermost module only.

    Return the names of buffers that changed their shape, which a graph cannot express.
    """
    reshaped: list[str] = []
    for name, before in then.items():
        value = now.get(name)
        if value is before or before is None:
            continue
        if isinstance(value, torch.Tensor) and value.shape == before.shape:
            before.copy_(value)
        else:
            reshaped.append(f"{path}.{name}".lstrip("."))
    return reshaped


def placed(output: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of an output except float64 to a dtype, if any."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in CASTABLE_DTYPES or tensor.dtype == dtype:
            return tensor
        with replaying(INSERTED):
            return tensor.to(dtype)

    return output if dtype is None else pytree.tree_map_only(torch.Tensor, cast, output)


def _structure(output: Any, tensors: Sequence[torch.Tensor]) -> OutputStructure | None:
    """Return the structure; ``None`` if an object with tensors cannot be copied."""
    try:
        leaves, spec = pytree.tree_flatten(with_objects_open(output))
    except Exception:  # a copy runs the code of the object's class
        return None
    numbers = {id(tensor): index for index, tensor in enumerate(tensors)}
    if {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)} != set(numbers):
        return None
    return OutputStructure(
        spec, tuple((numbers.get(id(leaf)), None if id(leaf) in numbers else leaf) for leaf in leaves)
    )


def tensor_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a batch in the order in which ``Entry.forward`` takes them."""
    return tensors_in((args, kwargs))


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name each leaf of a batch: ``input[0]``, ``input[1]['mask']``, or by keyword."""
    places = {f"input[{index}]": value for index, value in enumerate(args)} | kwargs
    return [
        (f"{name}{pytree.keystr(path)}", leaf)
        for name, value in places.items()
        for path, leaf in pytree.tree_flatten_with_path(
            value, is_leaf=lambda item: isinstance(item, PackedSequence)
        )[0]
    ]


def names_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name each tensor of a batch, in the order of ``tensor_leaves``."""
    names = [name for name, leaf in named_inputs(args, kwargs) if isinstance(leaf, torch.Tensor)]
    count = len(tensor_leaves(args, kwargs))
    # some may be inside objects, such as packed sequences
    return names if len(names) == count else [f"input[{number}]" for number in range(count)]


def layer_path(path: str) -> str:
    """Return the path of a module in the user's model: ``audited_model.encoder`` is ``encoder``."""
    first, _, rest = path.partition(".")
    # a replayed program may itself be a replay
    while first in (_EXPORT_ROOT, ENTRY_NAME, REPLAYED):
        path = rest
        first, _, rest = path.partition(".")
    return path


def layer_of(module_stack: Mapping[str, Any]) -> tuple[str, str]:
    """Return the path and class name of the innermost module of a stack, or empty strings.

    An entry with a third item, ``True``, is a layer without a module, whose path is used unchanged.
    """
    if not module_stack:
        return "", ""
    path, kind, *whole = list(module_stack.values())[-1]
    name = kind if isinstance(kind, str) else kind.__name__
    # torch writes name@1 for the second call of one module
    return path if whole else layer_path(path).split("@")[0], name.rsplit(".", 1)[-1]


def flatten_outputs(output: Any, *, once: bool = True) -> list[tuple[str, torch.Tensor]]:
    """List each tensor of an output with its path; a loss comes last.

    Args:
        output: What the model returns.
        once: Whether a tensor that occurs several times is listed under its first path only.
    """
    if isinstance(output, LossAndOutput):
        others = [
            (name, tensor)
            for name, tensor in flatten_outputs(output.output, once=once)
            if not once or tensor is not output.loss
        ]
        return [*others, ("loss", output.loss)]
    return _named_tensors(output, "output", once=once)


def _named_tensors(value: Any, name: str, *, once: bool = True) -> list[tuple[str, torch.Tensor]]:
    tensors: dict[int | str, tuple[str, torch.Tensor]] = {}

    def collect(value: Any, name: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            tensors.setdefault(id(value) if once else name, (name, value))
        elif depth < _MAX_DEPTH:
            for key, child in _children(value):
                collect(child, f"{name}{key}", depth + 1)

    collect(value, name, 0)
    return list(tensors.values())


def _children(value: Any) -> list[tuple[str, Any]]:
    if value is None or isinstance(value, _LEAVES):
        return []
    if isinstance(value, Mapping):
        return [(f".{key}", child) for key, child in value.items()]
    if isinstance(value, tuple | list):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    # a cache or another plain object that holds tensors
    return [(f".{key}", child) for key, child in getattr(value, "__dict__", {}).items()]


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor in the key of an object."""

    index: int


class _Template:
    """An object apart from its tensors: two are equal if everything else in them is equal."""

    def __init__(self, value: Any, names: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> None:
        self.names = names
        self._value = value
        self._tensors = tuple(tensors)

    @cached_property
    def _key(self) -> Any:
        return value_key(self.filled([_Place(index) for index in range(len(self._tensors))]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Template) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.names)

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Copy the object with other tensors in it."""
        memo = {id(old): new for old, new in zip(self._tensors, tensors, strict=True)}
        return copy.deepcopy(self._value, memo)


class Opened:
    """The tensors of an object as leaves that torch can flatten; ``template`` makes the object again."""

    def __init__(self, tensors: Sequence[Any], template: _Template) -> None:
        self.tensors = list(tensors)
        self.template = template


pytree.register_pytree_node(
    Opened,
    lambda item: (item.tensors, item.template),
    Opened,  # type: ignore[arg-type]
    flatten_with_keys_fn=lambda item: (
        list(zip(item.template.names, item.tensors, strict=True)),
        item.template,
    ),
)


def with_objects_open(value: Any) -> Any:
    """Open objects that hold tensors, so that their tensors are inputs as well."""

    def open_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) or not (named := _named_tensors(leaf, "")):
            return leaf
        names, tensors = zip(*named, strict=True)
        return Opened(tensors, _Template(leaf, names, tensors))

    return pytree.tree_map(open_leaf, value)


def restored(value: Any) -> Any:
    """Rebuild opened objects from their leaves."""

    def restore(leaf: Any) -> Any:
        return leaf.template.filled(leaf.tensors) if isinstance(leaf, Opened) else leaf

    return pytree.tree_map(restore, value, is_leaf=lambda leaf: isinstance(leaf, Opened))


def holds_objects(spec: pytree.TreeSpec) -> bool:
    """Return whether a structure has opened objects in it."""
    return spec.type is Opened or any(map(holds_objects, spec.children()))
