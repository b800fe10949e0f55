"""Reads a model's inputs: from a Python file, a safetensors file, or recorded calls."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, TypedDict

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.checkpoint import CALL_FILES, RECORDING, call_file
from ampaudit.checkpoint.open import map_checkpoint
from ampaudit.checkpoint.pickled import misfit
from ampaudit.checkpoint.safetensors import Shape
from ampaudit.core.errors import InputError, UsageError, WeightsError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import format_bytes, plural
from ampaudit.core.untrusted import MAX_TABLE, describe, describe_path, read_json, validate
from ampaudit.report.model import GIVEN, InputsInfo
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch, BatchFactory, ModelSource
from ampaudit.source.unwrapping import unwrapped
from ampaudit.source.user_code import calling_user_code, module_from_file
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name, tensors_in

CACHES = "transformers.cache_utils"
_TRANSFORMERS = (CACHES, "transformers.modeling_outputs")
_MAX_ELEMENTS = 1 << 60
_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_HINT = "record the calls again"
_Number = Annotated[int, Field(ge=0, le=10**12)]
_MISSING = object()
_FUNCTIONS = ("batches", "example_inputs", "example_kwargs")
_HINTS = {
    "NoneType": "return the inputs; for a model that takes none, return ()",
    "generator": "name the function batches() if it yields batches",
    "ndarray": "return a tensor: torch.from_numpy(...)",
}


def batches_of(module: ModuleType, count: int, seed: int, sizes: Mapping[str, int]) -> tuple[Batch, ...]:
    """Return up to ``count`` batches from batches() or from repeated calls of example_inputs().

    ``sizes`` are arguments for these functions, such as ``length``.

    Raises:
        InputError: Neither function exists, or its result is not an input.
        UsageError: No function has such a parameter.
    """
    _check_sizes(module, sizes)
    kwargs = _call(module, "example_kwargs", {}, sizes)
    if not isinstance(kwargs, Mapping):
        raise InputError(f"example_kwargs() returned {type(kwargs).__name__}", hint="return a dict")
    torch.manual_seed(seed + INPUT_SEED_OFFSET)
    result = _call(module, "batches", _MISSING, sizes)
    if result is not _MISSING:
        if isinstance(result, torch.Tensor | Mapping) or not isinstance(result, Iterable):
            what = f"batches() returned {type(result).__name__}"
            raise InputError(what, hint="return a list of batches, or yield them")
        with calling_user_code("batches()"):
            items = list(islice(result, count))
        if not items:
            raise InputError("batches() yields nothing", hint="yield at least one batch")
        return tuple(_batch(module, item, kwargs, "batches()") for item in items)
    if not callable(getattr(module, "example_inputs", None)):
        raise InputError(
            f"{module.__file__} has no example_inputs()",
            hint="add: def example_inputs(): return torch.randn(2, 16)  # whatever the model takes",
        )
    return tuple(
        _batch(module, _call(module, "example_inputs", None, sizes), kwargs, "example_inputs()")
        for _ in range(count)
    )


class Functions(TypedDict):
    """The optional functions of a model file; ``None`` if it lacks one."""

    loss: Callable[..., Any] | None
    metric: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    next_inputs: Any


def functions_of(*modules: ModuleType) -> Functions:
    """Return each function from the first module that defines it."""

    def first(name: str, fits: Callable[[Any], bool]) -> Any:
        return next((value for module in modules if fits(value := getattr(module, name, None))), None)

    return Functions(
        loss=first("loss", callable),
        metric=first("metric", callable),
        optimizer=first("optimizer", callable),
        next_inputs=first("next_inputs", lambda value: value is not None),
    )


def inputs_from(
    options: SourceConfig, model: nn.Module, *modules: ModuleType, same_model: bool = True
) -> tuple[BatchFactory, Functions, InputsInfo]:
    """Return the batch function for --inputs, and the file's loss(), metric() and optimizer().

    Functions that the file lacks come from the other modules. For ``same_model`` see ``recorded_calls``.

    Raises:
        InputError, SourceError: See ``batches_of``, ``recorded_calls`` and ``module_from_file``.
    """
    path = options.inputs
    assert path is not None
    if path.is_dir():
        batches, info = recorded_calls(path, options.batches, model, same_model=same_model)
        return partial(_recorded, batches), functions_of(*modules), info
    if path.suffix != ".py":
        hint = "give a Python file, a .safetensors file, a directory of recorded calls or, for ONNX, a .npz"
        raise InputError(f"--inputs {describe_path(path)}: not a file of inputs", hint=hint)
    module = module_from_file(path)
    make_batches = partial(batches_of, module, options.batches or 1, options.seed)
    return make_batches, functions_of(module, *modules), GIVEN


def _recorded(batches: tuple[Batch, ...], sizes: Mapping[str, int]) -> tuple[Batch, ...]:
    """Return recorded calls, whose sizes are fixed."""
    for axis in sizes:
        raise unknown_axis(axis, (), "a recording has the sizes that it has")
    return batches


def _call(module: ModuleType, name: str, default: Any, sizes: Mapping[str, int]) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        return default
    arguments = {axis: size for axis, size in sizes.items() if axis in _parameters(function)}
    with calling_user_code(f"{name}()"):
        return function(**arguments)


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameter names of a user's function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _check_sizes(module: ModuleType, sizes: Mapping[str, int]) -> None:
    functions = [f for name in _FUNCTIONS if callable(f := getattr(module, name, None))]
    axes = list(dict.fromkeys(name for function in functions for name in _parameters(function)))
    for axis, size in sizes.items():
        if axis not in axes:
            raise unknown_axis(axis, axes, f"write def example_inputs({axis}={size}): ...")


def unknown_axis(axis: str, axes: Sequence[str], otherwise: str) -> UsageError:
    """Return the error for an axis that the inputs do not have."""
    hint = f"axes of these inputs: {describe(', '.join(axes))}" if axes else otherwise
    return UsageError(f"--sweep: the inputs have no axis {describe(axis)!r}", hint=hint)


def _batch(module: ModuleType, item: Any, kwargs: Mapping[str, Any], what: str) -> Batch:
    """Build a batch; model_inputs(batch), if defined, selects the model's part of it."""
    select = getattr(module, "model_inputs", None)
    if not callable(select):
        return _inputs(item, kwargs, what)
    with calling_user_code("model_inputs(batch)"):
        value = select(item)
    return replace(_inputs(value, kwargs, "model_inputs(batch)"), item=item)


def _inputs(value: Any, kwargs: Mapping[str, Any], what: str) -> Batch:
    if isinstance(value, torch.Tensor):
        return Batch((value,), dict(kwargs))
    if isinstance(value, tuple | list) and any(item is ... for item in value):
        raise InputError(f"{what} returned the placeholder ...", hint="put an input in its place")
    if isinstance(value, Mapping):
        return Batch((), {**kwargs, **{str(key): item for key, item in value.items()}})
    if isinstance(value, tuple | list):
        return Batch(tuple(value), dict(kwargs))
    raise InputError(f"{what} returned {type(value).__name__}", hint=_HINTS.get(type(value).__name__))


def with_inputs(source: ModelSource, path: Path) -> ModelSource:
    """Replace the batches of a source by the tensors ``input[0]``, ``input[1]``, ... of a file.

    Raises:
        WeightsError: The file cannot be read.
        InputError: The tensors do not fit the model.
    """
    saved = map_checkpoint(path).tensors
    batch = source.batches[0]
    tensors = tensors_in((batch.args, batch.kwargs))
    names = [f"input[{index}]" for index in range(len(tensors))]
    if set(saved) != set(names):
        raise InputError(
            f"{path} holds {describe(', '.join(sorted(saved))) or 'nothing'}",
            hint=f"the model takes {describe(', '.join(names))}",
        )
    for name, tensor in zip(names, tensors, strict=True):
        if saved[name].dtype != tensor.dtype:
            hint = f"{name} must be {tensor.dtype}"
            raise InputError(f"{path}: {name} is {saved[name].dtype}", hint=hint)
    batches = (with_tensors(batch, [saved[name] for name in names]),)
    return replace(source, batches=batches, inputs=GIVEN, make_batches=None)


def with_tensors(batch: Batch, tensors: list[torch.Tensor]) -> Batch:
    """Replace the tensors of a batch."""
    fresh = iter(tensors)
    return Batch(*pytree.tree_map_only(torch.Tensor, lambda _: next(fresh), (batch.args, batch.kwargs)))


def save_inputs(tensors: list[torch.Tensor], path: Path) -> None:
    """Write a batch's tensors in the format of ``with_inputs``."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    save_file({f"input[{i}]": t.detach().cpu().contiguous() for i, t in enumerate(tensors)}, part)
    part.replace(path)


class _Tensor(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    tensor: str
    dtype: str
    shape: Annotated[Shape, Field(strict=False)]
    stride: Annotated[Shape, Field(strict=False)]
    offset: Annotated[int, Field(ge=0, le=_MAX_ELEMENTS)]


_TENSOR = TypeAdapter(_Tensor)


def known_classes(model: nn.Module) -> dict[str, type]:
    """Return the classes that a recording may name, without importing any.

    These are the dataclasses, named tuples and enumerations in the modules that define the model's classes,
    and the caches and outputs of Transformers for its models. The keys are ``module:name``, and the name
    alone, since the module of a recorded script is ``__main__``.
    """
    modules = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    sources = sorted(name for name in modules if not name.startswith("torch."))
    sources += _TRANSFORMERS if any(name.startswith("transformers.") for name in modules) else ()
    classes: dict[str, type] = {}
    for source in (*sources, "torch.nn.utils.rnn"):
        for kind in vars(sys.modules[source]).values() if source in sys.modules else ():
            if isinstance(kind, type) and _holds_data(kind):
                classes[f"{kind.__module__}:{kind.__qualname__}"] = kind
                classes.setdefault(kind.__qualname__, kind)
    return classes


def _holds_data(kind: type) -> bool:
    is_namedtuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_namedtuple or dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum) or is_cache(kind)


def is_cache(kind: type) -> bool:
    """Return whether a class is a Transformers cache or a subclass of one."""
    return any(base.__module__ == CACHES for base in kind.__mro__)


class Rebuilder:
    """Rebuilds the arguments of one recorded call from its JSON file, and counts the bytes of its tensors.

    With ``widened``, an argument that is a 16-bit ``torch.dtype`` becomes float32. Tensors keep their dtype.
    """

    def __init__(
        self, path: Path, tensors: dict[str, torch.Tensor], classes: Mapping[str, type], *, widened: bool
    ) -> None:
        self.nbytes = 0
        self._path, self._tensors, self._classes, self._widened = path, tensors, classes, widened
        self._views: dict[tuple[object, ...], torch.Tensor] = {}

    def rebuild(self, value: Any, place: str) -> Any:
        """Rebuild a value from its JSON.

        Raises:
            InputError: The JSON is malformed, or names an unknown class.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return self._items(value, place)
        if "tensor" in value:
            return self._tensor(value, place)
        if len(value) != 1:
            raise self._error(place, "is not one value")
        ((kind, content),) = value.items()
        build = _BUILDERS.get(kind)
        if build is None:
            raise self._error(place, f"is of the unknown kind {describe(kind)!r}")
        try:
            return build(self, content, place)
        except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise self._error(place, f"is not a valid {kind}") from error

    def _items(self, values: Any, place: str) -> list[Any]:
        if not isinstance(values, list):
            raise self._error(place, "is not a list")
        return [self.rebuild(item, f"{place}[{index}]") for index, item in enumerate(values)]

    def _tensor(self, value: dict[str, Any], place: str) -> torch.Tensor:
        view = validate(_TENSOR, value, self._path, InputError, _HINT)
        key = view.tensor, view.dtype, view.shape, view.stride, view.offset
        if key in self._views:
            return self._views[key]
        stored, dtype = self._tensors.get(view.tensor), getattr(torch, view.dtype, None)
        if stored is None:
            raise self._error(
                place, f"is the tensor {describe(view.tensor)!r}, which is not in the file beside it"
            )
        if not isinstance(dtype, torch.dtype) or len(view.stride) != len(view.shape):
            raise self._error(place, f"is not a tensor of {describe(view.dtype)}")
        raw = stored.reshape(-1).view(torch.uint8)
        flat = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        why = misfit(view.shape, view.stride, view.offset, flat.numel(), _MAX_ELEMENTS)
        if why:
            raise self._error(place, why)
        tensor = flat.as_strided(view.shape, view.stride, view.offset)
        self.nbytes += tensor.numel() * dtype.itemsize
        return self._views.setdefault(key, tensor)

    def _named_class(self, name: Any, place: str, fits: Callable[[type], bool] | None = None) -> type:
        text = name if isinstance(name, str) else ""
        kind = self._classes.get(text) or self._classes.get(text.rpartition(":")[2])
        if kind is None:
            raise InputError(
                f"{describe_path(self._path)}: {describe(place)} is of the class {describe(name)}, "
                "which the model's code does not know",
                hint="import the class in the file that defines the model",
            )
        if fits is not None and not fits(kind):
            raise self._error(place, f"is not a valid {kind.__name__}")
        return kind

    def _instance(self, content: Any, place: str, allowed: Callable[[type], bool]) -> Any:
        """Rebuild an object from its attributes; only subclasses of dict are called."""
        name, attributes = content
        kind = self._named_class(name, place)
        values = {key: self.rebuild(item, f"{place}.{key}") for key, item in attributes.items()}
        overrides = any(key.startswith("__") or callable(getattr(kind, key, None)) for key in values)
        if overrides or not allowed(kind):
            raise self._error(place, f"is not a valid {kind.__name__}")
        if issubclass(kind, dict):  # the outputs of Transformers and diffusers
            return kind(**{key: item for key, item in values.items() if item is not None})
        _register(kind)
        return _instance_with(kind, values)

    def _dataclass(self, content: Any, place: str) -> Any:
        def complete(kind: type) -> bool:
            return dataclasses.is_dataclass(kind) and {f.name for f in dataclasses.fields(kind)} == set(
                content[1]
            )

        return self._instance(content, place, complete)

    def _namedtuple(self, content: Any, place: str) -> Any:
        name, items = content
        kind: Any = self._named_class(
            name,
            place,
            lambda kind: issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(items),
        )
        return tuple.__new__(kind, self._items(items, place))

    def _enum(self, content: Any, place: str) -> Any:
        name, member = content
        kind: Any = self._named_class(
            name, place, lambda kind: issubclass(kind, enum.Enum) and member in kind.__members__
        )
        return kind.__members__[member]

    def _dict(self, content: Any, place: str) -> dict[Any, Any]:
        pairs = [(self.rebuild(key, place), key, item) for key, item in content]
        return {name: self.rebuild(item, f"{place}[{describe(key)!r}]") for name, key, item in pairs}

    def _torch_value(self, content: Any, place: str, kind: str) -> Any:
        member = getattr(torch, content, None)
        if not isinstance(member, _KINDS[kind]):
            raise self._error(place, f"is not a valid {kind}")
        return torch.float32 if self._widened and member in LOW_PRECISION_DTYPES else member

    def _error(self, place: str, what: str) -> InputError:
        return InputError(f"{describe_path(self._path)}: {describe(place)} {what}", hint=_HINT)


_Builder = Callable[[Rebuilder, Any, str], Any]


def _of_items(make: Callable[[list[Any]], Any]) -> _Builder:
    return lambda rebuilder, content, place: make(rebuilder._items(content, place))


_BUILDERS: dict[str, _Builder] = {
    "tuple": _of_items(tuple),
    "set": _of_items(set),
    "frozenset": _of_items(frozenset),
    "size": _of_items(torch.Size),
    "slice": _of_items(lambda items: slice(*items)),
    "range": _of_items(lambda items: range(*items)),
    "dict": Rebuilder._dict,
    "namedtuple": Rebuilder._namedtuple,
    "dataclass": Rebuilder._dataclass,
    "object": lambda rebuilder, content, place: rebuilder._instance(content, place, is_cache),
    "class": Rebuilder._named_class,
    "enum": Rebuilder._enum,
    "array": lambda rebuilder, content, place: rebuilder._tensor(content, place).numpy(),
    "scalar": lambda rebuilder, content, place: rebuilder._tensor(content, place).numpy()[()],
    "bytes": lambda _, content, __: bytes.fromhex(content),
    "float": lambda _, content, __: float(content),
    "complex": lambda _, content, __: complex(content),
    # tensors of a recording are on the CPU; options of the audit choose the device
    "device": lambda _, content, __: torch.device("cpu"),
    "generator": lambda _, content, __: torch.Generator().manual_seed(content),
} | {kind: partial(Rebuilder._torch_value, kind=kind) for kind in _KINDS}


def _instance_with(kind: type, values: dict[str, Any]) -> Any:
    instance: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def _register(kind: type) -> None:
    """Register a class as a pytree node, so that tensors in its objects are inputs of a trace."""

    def flatten(value: Any) -> tuple[list[Any], Any]:
        attributes = _attributes(value)
        return list(attributes.values()), tuple(attributes)

    def unflatten(values: Iterable[Any], names: Any) -> Any:
        return _instance_with(kind, dict(zip(names, values, strict=True)))

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        attributes = _attributes(value)
        return [(pytree.GetAttrKey(name), item) for name, item in attributes.items()], tuple(attributes)

    with suppress(ValueError):  # registered already
        pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value))


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # later versions may add keys


class _Parameters(_Record):
    sha256: str
    count: int
    dtypes: list[str]


class _Totals(_Record):
    made: int
    recorded: int


class _Recording(_Record):
    schema_: Annotated[Literal[1], Field(alias="schema")]
    kind: Literal["recording"]
    module: str
    parameters: _Parameters
    calls: _Totals | None
    class_: Annotated[str, Field(alias="class")]


class _Call(_Record):
    call: _Number
    positional: Annotated[list[Any], Field(alias="args")]
    named: Annotated[dict[str, Any], Field(alias="kwargs")]
    training: bool
    autocast: dict[str, str]


_RECORDING, _CALL = TypeAdapter(_Recording), TypeAdapter(_Call)


def structure_of(module: nn.Module) -> dict[str, Any]:
    """Return a digest of parameter names and shapes, the number of parameters, and their dtypes."""
    parameters = [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in unwrapped(module).named_parameters(remove_duplicate=False)
    ]
    lines = "".join(sorted(f"{name} {tuple(parameter.shape)}\n" for name, parameter in parameters))
    dtypes = sorted({dtype_name(parameter.dtype) for _, parameter in parameters})
    return {"sha256": hashlib.sha256(lines.encode()).hexdigest(), "count": len(parameters), "dtypes": dtypes}


def recorded_calls(
    directory: Path, count: int | None, model: nn.Module, *, same_model: bool = True
) -> tuple[tuple[Batch, ...], InputsInfo]:
    """Read up to ``count`` calls of a recording, or all, as named batches.

    With ``same_model``, the model must have the parameters of the recorded module.

    Raises:
        InputError: The recording is missing, inconsistent, or of another model.
    """
    recording, structure = _read_recording(directory), structure_of(model)
    theirs = recording.parameters
    if same_model and structure["sha256"] != theirs.sha256:
        recorded = f"{_short(recording.class_)} with {plural(theirs.count, 'parameter')}"
        this = f"{type(unwrapped(model)).__name__} with {structure['count']:,}"
        raise InputError(
            f"{describe_path(directory)}: the calls of another model: {recorded}, recorded as "
            f"{describe(recording.module)}; this is {this}",
            hint="names and shapes of the parameters must be the same; record this model",
        )
    files, classes = _files(directory, recording), known_classes(model)
    # the recorded module had 16-bit parameters, and this model has none: widen the inputs as well
    low = set(map(dtype_name, LOW_PRECISION_DTYPES))
    dtypes = structure["dtypes"]
    widen = bool(low & set(theirs.dtypes)) and bool(dtypes) and not low & set(dtypes)
    calls = [_read(file, classes, widen=widen) for file in files[:count]]
    _check_memory(directory, calls, widen=widen)
    batches = tuple(call.batch.mapped(_widened) if call.widened else call.batch for call in calls)
    return batches, InputsInfo("given", _describe_calls(directory, recording, calls, len(files)))


@dataclass(frozen=True, slots=True)
class _StoredCall:
    number: int
    batch: Batch
    training: bool
    widened: bool
    nbytes: int  # of its tensors


def _read_recording(directory: Path) -> _Recording:
    path = directory / RECORDING
    if not path.is_file():
        inner = sorted(file.parent.name for file in directory.glob(f"*/{RECORDING}"))
        hint = "give a directory that 'ampaudit record' wrote"
        if inner:
            hint = f"it holds recordings of {describe(', '.join(inner))}: give one of these directories"
        raise InputError(f"{describe_path(directory)}: no {RECORDING}", hint=hint)
    table = read_json(path, MAX_TABLE, InputError, _HINT)
    return validate(_RECORDING, table, path, InputError, _HINT)


def _files(directory: Path, recording: _Recording) -> list[Path]:
    """Return the files of the calls in order."""
    files = sorted(directory.glob(CALL_FILES), key=lambda file: (len(file.name), file.name))
    if not files:
        raise InputError(f"{describe_path(directory)}: holds no call", hint=_HINT)
    if recording.calls is not None and len(files) != recording.calls.recorded:
        what = f"{plural(len(files), 'call')} of {recording.calls.recorded:,} that were recorded"
        raise InputError(f"{describe_path(directory)}: holds {what}", hint=_HINT)
    return files


def _read(path: Path, classes: Mapping[str, type], *, widen: bool) -> _StoredCall:
    call = validate(_CALL, read_json(path, MAX_TABLE, InputError, _HINT), path, InputError, _HINT)
    if path.name != call_file(call.call):
        raise InputError(f"{describe_path(path)}: describes call {call.call}", hint=_HINT)
    values = path.with_suffix(".safetensors")
    try:
        tensors = map_checkpoint(values).tensors if values.exists() else {}
    except WeightsError as error:
        raise InputError(str(error.args[0]), hint=_HINT) from error
    widened = widen and not call.autocast
    rebuilder = Rebuilder(path, tensors, classes, widened=widened)
    args = tuple(rebuilder.rebuild(value, f"input[{index}]") for index, value in enumerate(call.positional))
    kwargs = {name: rebuilder.rebuild(value, name) for name, value in call.named.items()}
    batch = Batch(args, kwargs, name=f"call {call.call}")
    return _StoredCall(call.call, batch, call.training, widened, rebuilder.nbytes)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION_DTYPES else tensor


def _check_memory(directory: Path, calls: Iterable[_StoredCall], *, widen: bool) -> None:
    """Reject calls that exceed free memory: all of them if they are widened, else the largest."""
    available = psutil.virtual_memory().available
    largest = max(calls, key=lambda call: call.nbytes)
    needed = 2 * sum(call.nbytes for call in calls) if widen else largest.nbytes
    if needed > available:
        what = "the calls need" if widen else f"call {largest.number} needs"
        raise InputError(
            f"{describe_path(directory)}: {what} {format_bytes(needed)} of memory; "
            f"{format_bytes(available)} are free",
            hint="replay fewer calls with --batches, or record smaller ones",
        )


def _describe_calls(directory: Path, recording: _Recording, calls: list[_StoredCall], total: int) -> str:
    numbers = f"call {calls[0].number}"
    if len(calls) > 1:
        numbers = f"calls {calls[0].number} to {calls[-1].number}"
    words = f"{len(calls)} of {plural(total, 'recorded call')} of {_short(recording.class_)} ({numbers})"
    words += f" in {describe(directory)}"
    modes = {call.training for call in calls}
    return f"{words}, made in {'train' if True in modes else 'eval'} mode" if len(modes) == 1 else words


def _short(name: str) -> str:
    return describe(name.rpartition(":")[2], 40)
