"""Supplies FP32 values to a trace: numbers that Python reads, and sizes that depend on values."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from types import ModuleType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.errors import TraceFailed
from ampaudit.core.sites import SiteId, SiteNumbering, SourceLine
from ampaudit.core.untrusted import describe
from ampaudit.trace.entry import layer_path
from ampaudit.trace.failure import without_low_precision, writable
from ampaudit.trace.fake_model import fake_like, named_tensors
from ampaudit.trace.flatten import VALUE_READ, VALUE_SIZED
from ampaudit.trace.graph import Site, TracedModel
from ampaudit.trace.internals import (
    NO_VALUE,
    FakeTensor,
    ProxyTorchDispatchMode,
    Replacement,
    compiler,
    export_trace,
    fx_tracing,
    looking_up_fake_tensors,
    patched,
    recording_mode,
    without_autocast,
    without_modes,
    without_symbols,
    without_torch_function,
)
from ampaudit.trace.isolation import preserved
from ampaudit.trace.op_calls import OpCalled, record_described
from ampaudit.trace.opnames import converts, written_values
from ampaudit.trace.path.reads import ReadValues, python_value
from ampaudit.trace.stack import calling_line, is_tool_file, running_lines
from ampaudit.trace.values import CASTABLE_DTYPES, storage_id, tensors_in, widened

# the attribute of a fake tensor that holds its value: Module.to swaps no tensor that is weakly referenced
_VALUE = "ampaudit_fp32_value"
MAX_OPS = 100_000  # minutes of tracing
aten = torch.ops.aten
# ops that return numbers to Python, by what Python calls them
READING = {
    aten.item.default: "item",
    aten._local_scalar_dense.default: "item",
    aten.is_nonzero.default: "bool",
    aten.equal.default: "equal",
    aten.allclose.default: "allclose",
}


class PathTracing(StrEnum):
    """Whether a trace follows the path that its inputs take; it is valid for inputs that take the same."""

    OFF = "off"
    FALLBACK = "fallback"  # where there is no trace for all inputs
    ON = "on"


@dataclass(frozen=True, slots=True)
class PathInputs:
    """The FP32 values that decide the path of a step."""

    # input tensors of the FP32 run; the trace has the dtypes of the 16-bit run
    inputs: Sequence[torch.Tensor]
    buffers: Mapping[str, torch.Tensor]  # buffers as earlier steps have left them, by name


class PathRecorder:
    """Follows one trace with the FP32 values of its tensors."""

    def __init__(self) -> None:
        self.values = Fp32Values()  # FP32 values of the tensors
        self.reads = ReadValues()  # reads of these values by the model's code
        self._layer: Any = lambda: ""

    def begin(
        self,
        model: nn.Module,
        fake_model: nn.Module,
        fakes: Sequence[torch.Tensor],
        initial: PathInputs,
    ) -> None:
        """Give the weights and inputs of a trace their values."""
        with computing():
            self.values.give_model(model, fake_model, initial.buffers)
            self.values.give_result(fakes, [writable(tensor, None) for tensor in initial.inputs])
        for fake in (*fakes, *fake_model.parameters()):
            if isinstance(fake, FakeTensor):
                without_symbols(fake.fake_mode)

    @contextmanager
    def answering(self, layer: Any) -> Iterator[None]:
        """Answer reads of fake tensors while active; ``layer`` gives the layer whose code is running."""
        self._layer = layer

        reads = [Replacement(FakeTensor, name, _reading(self, name)) for name in ("item", "tolist", "numpy")]
        # Python's built-in functions call these methods, and torch's have no values
        numbers = [
            Replacement(FakeTensor, "__int__", lambda tensor: int(tensor.item())),
            Replacement(FakeTensor, "__float__", lambda tensor: float(self.read("float", tensor))),
            Replacement(FakeTensor, "__format__", _format),
        ]
        # torch.export's own max() and min() take no tensor of several values
        builtins = Replacement(export_trace(), "_override_builtin_ops", nullcontext)
        constructors = [
            Replacement(torch, f.__name__, tensor_of(_stacking(f))) for f in (torch.tensor, torch.as_tensor)
        ]
        constructors.append(Replacement(torch, "from_numpy", tensor_of(torch.from_numpy)))
        constructors.append(Replacement(FakeTensor, "new_tensor", _new_tensor))
        methods = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        indexing = [Replacement(FakeTensor, method.__name__, _indexing(method)) for method in methods]
        patches = patched([*reads, *numbers, builtins, *constructors, *indexing])
        flag = TracingFlag(is_tool_file)
        with patches, flag.installed(), looking_up_fake_tensors(_FakeTensorInsideTorch):
            yield

    def read_by(self, mode: ProxyTorchDispatchMode, op: OpOverload, args: tuple[Any, ...]) -> Any:
        """Return what an op gives to Python code."""
        with mode:
            if op is aten.is_nonzero.default and args[0].dtype is not torch.bool:
                return self.read("bool", args[0].ne(0))  # only whether the number is 0 decides
            if op is aten.allclose.default:
                return self.read("allclose", torch.isclose(*args).all())
            if op is not aten.equal.default:
                return self.read(READING[op], args[0])
            first, second = args
            return first.shape == second.shape and self.read("equal", first.eq(second).all())

    def read(self, name: str, tensor: torch.Tensor) -> Any:
        """Return the FP32 value of a tensor to Python code, and mark where it was read."""
        with computing():
            value = self.values.of(tensor).detach().to("cpu", copy=True)  # the code may write to an array
            own_value = (
                value.to(tensor.dtype) if tensor.dtype is torch.bfloat16 and name == "numpy" else value
            )
            result = python_value(name, own_value)  # raises as torch does, for several values or bfloat16
            if name == "numpy" and tensor.dtype is torch.float16:
                result = result.view(HalfArray)
        if recording_mode() is None or getattr(tensor, "constant", None) is not None:
            return result
        read = self.reads.add(name, self._layer(), value)
        VALUE_READ([tensor], read.number)
        return self.reads.tracked(read, result)

    def record(
        self, mode: ProxyTorchDispatchMode, called: OpCalled, original_args: Mapping[int | str, Any]
    ) -> Any:
        """Record an op whose result torch cannot describe without values."""
        values = self.values.call(called, original_args)
        fakes = [tensor for tensor in called.tensors if isinstance(tensor, FakeTensor)]
        described = values if called.op.namespace == "aten" else self._in_own_dtypes(called, values)
        dtypes = {fake.dtype for fake in fakes} & set(CASTABLE_DTYPES)
        low = dtypes.pop() if len(dtypes) == 1 else torch.float32

        def fake_of(value: torch.Tensor) -> torch.Tensor:
            dtype = low if described is values and value.dtype is torch.float32 else value.dtype
            return fake_like(value, fakes[0].fake_mode, dtype)

        result = record_described(mode, called, pytree.tree_map_only(torch.Tensor, fake_of, described))
        self.values.give_result(result, values)
        self.keep(mode, result)  # Python may branch on the size
        return result

    def runs(self, called: OpCalled) -> bool:
        """Return whether an op that torch cannot describe runs, and can be recorded by its values.

        Torch's function for fake tensors may be stricter than the kernel, as for ``_grouped_mm``.
        """
        if called.op._schema.is_mutable:
            return False
        try:
            self.values.call_in_own_dtypes(called)
        except Exception:  # whatever a kernel raises
            return False
        return True

    def keep(self, mode: ProxyTorchDispatchMode, result: Any) -> None:
        """Keep an op even if nothing uses its result; later random numbers depend on those drawn before."""
        with mode:
            VALUE_SIZED(tensors_in(result), 0)

    def _in_own_dtypes(self, called: OpCalled, values: Any) -> Any:
        """Call an op in the dtypes of the trace to learn the dtypes of its results."""
        results = self.values.call_in_own_dtypes(called)
        shapes = [getattr(leaf, "shape", None) for leaf in pytree.tree_leaves(results)]
        if shapes == [getattr(leaf, "shape", None) for leaf in pytree.tree_leaves(values)]:
            return results
        return pytree.tree_map(lambda v, r: v.to(r.dtype) if hasattr(r, "dtype") else v, values, results)


def _reading(recorder: PathRecorder, name: str) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: recorder.read(name, tensor)


def _format(tensor: FakeTensor, specification: str) -> str:
    """Format the number in a tensor, as ``f"{tensor}"`` does."""
    value = tensor.item() if tensor.dim() == 0 else object.__repr__(tensor)
    return format(value, specification)


def _stacking(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that makes a tensor of a list: tensors of the trace in it are stacked.

    Torch would read their memory, which they lack.
    """

    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        leaves = pytree.tree_leaves(data) if isinstance(data, list | tuple) else []
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return function(data, *args, **kwargs)
        dtypes = [leaf.dtype if isinstance(leaf, torch.Tensor) else function(leaf).dtype for leaf in leaves]
        dtype = kwargs.get("dtype") or (args[0] if args else None) or reduce(torch.promote_types, dtypes)
        return _stacked(data, dtype)

    return make


def _indexing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an indexing method: tensors of the trace in a list of positions are stacked."""

    def call(tensor: torch.Tensor, index: Any, *value: Any) -> Any:
        positions = tuple(map(_stacked_positions, index)) if isinstance(index, tuple) else index
        return method(tensor, positions, *value)

    return call


def _stacked_positions(index: Any) -> Any:
    held = isinstance(index, list | tuple) and any(isinstance(item, FakeTensor) for item in index)
    return torch.tensor(index) if held else index


def _new_tensor(tensor: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(data, **{"dtype": tensor.dtype, "device": tensor.device, **kwargs})


def _stacked(data: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(item, dtype) for item in data])
    return data.detach().to(dtype) if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype)


class HalfArray(np.ndarray[Any, Any]):
    """The FP32 values of an array that is float16 in the 16-bit run, like all that NumPy computes from it.

    Unless its code asks for another dtype, a tensor made of it is float16 as well.
    """

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert to another dtype; to float16, the values stay those of FP32."""
        if np.dtype(dtype) == np.float16:
            return self.copy()
        return np.asarray(self).astype(dtype, *args, **kwargs)


def tensor_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that makes a tensor of an array: of a ``HalfArray``, it is cast to float16."""

    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(data, HalfArray):
            return function(data, *args, **kwargs)
        tensor = function(np.asarray(data), *args, **kwargs)
        has_dtype = args or kwargs.get("dtype") is not None
        return tensor.to(torch.float16) if tensor.dtype is torch.float32 and not has_dtype else tensor

    return make


class TracingFlag:
    """Tells the code of some files only that the model is being traced, whichever function returns it.

    Attributes:
        is_hidden_from_model: Whether code has asked that is not told.
    """

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._knows = knows
        self.is_hidden_from_model = False

    def _answer(self) -> bool:
        knows = self._knows(sys._getframe(2).f_code.co_filename)
        self.is_hidden_from_model |= not knows
        return knows

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Answer in place of torch's own flags while active."""

        @contextmanager
        def flags_set() -> Iterator[None]:
            names = ("_is_compiling_flag", "_is_exporting_flag")
            with patched(Replacement(compiler, name, self) for name in names):
                yield

        replacements = (
            Replacement(export_trace(), "_compiling_state_context", flags_set),
            Replacement(fx_tracing, "is_fx_tracing", lambda: self),
        )
        with patched(replacements):
            yield


def _operator(name: str) -> Callable[..., Any]:
    def call(flag: TracingFlag, *others: Any) -> Any:
        answer = flag._answer()
        return getattr(answer, name)(*(answer if other is flag else other for other in others))

    return call


# every operator of a boolean, which is an integer in Python
for _name, _value in vars(int).items():
    if isinstance(_value, WrapperDescriptorType) and _name != "__getattribute__":
        setattr(TracingFlag, _name, _operator(_name))


class _NoTensor:
    """Stands for the class of fake tensors in a model's code: no tensor is an instance."""


class _FakeTensorInsideTorch(ModuleType):
    """A module that gives the class of fake tensors to torch's own code only."""

    @property
    def FakeTensor(self) -> type:  # noqa: N802
        return FakeTensor if is_tool_file(sys._getframe(1).f_code.co_filename) else _NoTensor


@contextmanager
def computing() -> Iterator[None]:
    """Compute with real tensors while a trace is being made."""
    with without_modes(), without_torch_function(), without_autocast(), torch.no_grad():
        yield


class Fp32Values:
    """The FP32 values of fake tensors, each for as long as its fake tensor exists.

    They are those of the reference: 16-bit dtypes are widened to float32, and arguments that the policy
    changed are taken as the FP32 model has them. The user's own tensors are never written to.
    """

    def __init__(self) -> None:
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # real tensors, kept alive
        self._shared: set[int] = set()  # storages of the user's own weights
        self._count = 0

    def give_model(
        self, model: nn.Module, fake_model: nn.Module, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """Give the fake parameters and buffers of a model the values of the real ones.

        Buffers may have others of earlier steps.
        """
        real = named_tensors(model)
        for name, fake in named_tensors(fake_model).items():
            if name not in real or _VALUE in vars(fake):
                continue
            if isinstance(real[name], nn.Parameter):
                value = without_low_precision(real[name], None)
                self._shared.add(storage_id(value))
            else:
                value = writable(buffers.get(layer_path(name), real[name]), None)
            vars(fake)[_VALUE] = value

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the FP32 value of a tensor of the trace; a real one is a constant."""
        if isinstance(tensor, FakeTensor):
            if _VALUE not in vars(tensor):
                raise RuntimeError(NO_VALUE)  # made by a fake kernel: the op stays whole
            value: torch.Tensor = vars(tensor)[_VALUE]
            return value
        if id(tensor) not in self._constants:
            self._constants[id(tensor)] = tensor, writable(tensor, None)
        return self._constants[id(tensor)][1]

    def call(self, called: OpCalled, original_args: Mapping[int | str, Any]) -> Any:
        """Return the result of an op on FP32 values."""
        with computing():
            for fake in written_values(called.op, called.args, called.kwargs):
                if isinstance(fake, FakeTensor) and storage_id(self.of(fake)) in self._shared:
                    vars(fake)[_VALUE] = self.of(fake).clone()
            args = tuple(original_args.get(i, value) for i, value in enumerate(called.args))
            kwargs = {name: original_args.get(name, value) for name, value in called.kwargs.items()}
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.of, (widened(args), widened(kwargs)))
            result = called.op(*args, **kwargs)
            if converts(called.op) and result is args[0] and storage_id(result) not in self._shared:
                return result.clone()  # in 16 bits, a cast is a copy
            return result

    def call_in_own_dtypes(self, called: OpCalled) -> Any:
        """Return the result of an op on copies of the values, in the dtypes of the trace."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return self.of(tensor).to(tensor.dtype, copy=True)

        with computing(), preserved():
            args, kwargs = pytree.tree_map_only(torch.Tensor, copied, (called.args, called.kwargs))
            return called.op(*args, **kwargs)

    def follow(self, called: OpCalled, original_args: Mapping[int | str, Any], result: Any) -> None:
        """Compute an op that was recorded on fake tensors.

        Raises:
            TraceFailed: The path has so many ops that it may not end.
        """
        self._count += 1
        if self._count > MAX_OPS:
            line = calling_line()
            where = f"{line.file}:{line.line}: " if line is not None else ""
            raise TraceFailed(
                f"{where}the path of these inputs has more than {MAX_OPS:,} ops",
                hint="if a loop does not end, give it a limit; otherwise audit a smaller input",
            )
        self.give_result(result, self.call(called, original_args))

    def give_result(self, result: Any, values: Any) -> None:
        """Give the fake tensors among an op's results their values."""
        fakes, leaves = pytree.tree_leaves(result), pytree.tree_leaves(values)
        for fake, value in zip(fakes, leaves, strict=True):
            if isinstance(fake, torch.Tensor):
                vars(fake)[_VALUE] = value


def refuse_path(traced: TracedModel, what: str) -> None:
    """Raise if a graph holds for one path through the model's code, where one for all inputs is needed.

    Raises:
        TraceFailed: The message names the first line that decides on values.
    """
    if traced.path is None:
        return
    line = next((read.source for read in traced.path if read.source is not None), None)
    where = f"{line.file}:{line.line}: " if line is not None else ""
    code = f" at '{describe(line.code)}'" if line is not None and line.code else ""
    raise TraceFailed(
        f"{where}the code depends on values{code}, and {what} needs a graph for all inputs",
        hint="use torch.where or torch.cond there; ampaudit scan audits the path that given inputs take",
    )


class PathNumbering(SiteNumbering):
    """Assigns to the ops of a path the ids that earlier paths have at the same source line."""

    def __init__(self, earlier: Sequence[Site]) -> None:
        super().__init__(site.id for site in earlier)
        self._known = _ids_by_place(earlier)

    def next_id(self, layer: str, op: str) -> SiteId:
        """Return the id that an earlier path has at this line, or a new one."""
        if not self._known:
            return super().next_id(layer, op)
        earlier_ids = self._known[(f"{layer or '(top)'}/{op}", *map(_position, running_lines()), None)]
        return earlier_ids.popleft() if earlier_ids else super().next_id(layer, op)


def with_known_casts(traced: TracedModel, earlier: Sequence[Site]) -> TracedModel:
    """Assign to casts, whose ids are made after the trace, the ids that they have on earlier paths."""
    ids, ops = _ids_by_place(earlier), [site for site in traced.sites if site.facts is not None]
    numbering = SiteNumbering(site.id for site in (*earlier, *ops))
    sites = []
    for site in traced.sites:
        if site.facts is None:
            same, (around, _, name) = ids[_place(site)], site.id.rpartition("/")
            site_id = same.popleft() if same else numbering.next_id(around, name.partition("#")[0])
            site = replace(site, id=site_id)
        sites.append(site)
    return replace(traced, sites=tuple(sites))


def _ids_by_place(sites: Sequence[Site]) -> defaultdict[tuple[Any, ...], deque[SiteId]]:
    ids: defaultdict[tuple[Any, ...], deque[SiteId]] = defaultdict(deque)
    for site in sites:
        ids[_place(site)].append(site.id)
    return ids


def _place(site: Site) -> tuple[Any, ...]:
    around, _, name = site.id.rpartition("/")  # a layer, or the call of an op whose twin it is part of
    return f"{around}/{name.partition('#')[0]}", _position(site.source), _position(site.caller), site.weight


def _position(line: SourceLine | None) -> tuple[str, int] | None:
    return None if line is None else (line.file, line.line)
