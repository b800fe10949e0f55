"""Exports a model while a caster casts its ops.

Code that never reads a dtype computes the same ops in every precision. ``PrecisionReads`` collects the lines
that do: a function mode sees reads of tensors, and torch's functions about autocast are replaced.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import logging
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, permutations, product
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ampaudit.core.errors import AuditError, TraceFailed, first_line, text_of
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId, SiteNumbering, SourceLine
from ampaudit.policy import Decision, Measurement, RuleSet
from ampaudit.trace import entry
from ampaudit.trace.backward.tracer import AFTER_ACCUMULATION, BackwardTracer, CustomCode
from ampaudit.trace.caster import Caster, FactFinder, autocast_visible, mixed_recurrent_inputs
from ampaudit.trace.entry import Entry, flatten_outputs, layer_path, names_of_tensors, tensor_leaves
from ampaudit.trace.failure import lines_of, output_captured, trace_failure
from ampaudit.trace.fake_model import (
    constant_masters,
    conversion_method,
    fake_like,
    is_cast,
    make_fake_model,
    named_tensors,
    storage_notes,
    storage_of,
)
from ampaudit.trace.flatten import flat_graph
from ampaudit.trace.graph import Placeholder, Role, Site, Slot, TracedModel, build_sites
from ampaudit.trace.internals import (
    FakeTensor,
    FakeTensorMode,
    Replacement,
    ShapeEnv,
    lazy_graph_modules,
    patched,
    without_torch_function,
)
from ampaudit.trace.interpose import DispatchHook, current_layer, same_module
from ampaudit.trace.isolation import caches_cleared_of_fakes, seeded
from ampaudit.trace.op_calls import Edit
from ampaudit.trace.opnames import argument_names, mutated_arguments, named_arguments
from ampaudit.trace.path.recorder import (
    PathInputs,
    PathNumbering,
    PathRecorder,
    PathTracing,
    TracingFlag,
)
from ampaudit.trace.stack import code_line, is_library, is_tool_file, library_path
from ampaudit.trace.state import StateChange
from ampaudit.trace.values import (
    LOW_PRECISION_DTYPES,
    SharedMemory,
    fake_arguments,
    inexact,
    node_dtype,
    storage_id,
    torch_dtype,
)

# for each input tensor, the torch.export.Dim of each axis that may vary; None if there is none
Dimensions = tuple[Mapping[int, Any] | None, ...]
_FixedLines = dict[str, tuple[int, SourceLine | None, SourceLine | None]]
_VIOLATED = "Constraints violated"
_RANGE = re.compile(r"^ *(\w+) = Dim\('\1'(?:, min=(\d+))?(?:, max=(\d+))?\)$", re.MULTILINE)
_GUARD = re.compile(
    r"Not all values of (\w+) = (.+) in the specified range satisfy the generated guard (.+?)\.?$", re.M
)
_OTHER = re.compile(r"^ {2}(\w+ = (?!Dim\().+)$", re.MULTILINE)
_SLOTS = {
    InputKind.PARAMETER: Slot.PARAMETER,
    InputKind.BUFFER: Slot.BUFFER,
    InputKind.CONSTANT_TENSOR: Slot.CONSTANT,
    InputKind.USER_INPUT: Slot.INPUT,
}
_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
# functions that reveal the dtype of an argument to Python code
_DTYPE_READS: frozenset[Any] = frozenset(
    {
        _DTYPE,
        torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
        torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
        torch.Tensor.element_size,
        torch.Tensor.type,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
        torch.Tensor.storage,
        torch.Tensor.storage_type,
        torch.Tensor.untyped_storage,
        # constants that are rounded while the model is traced
        torch.Tensor.new_tensor,
        torch.Tensor.__setitem__,
        torch.result_type,
    }
)
_AUTOCAST = (
    "is_autocast_enabled",
    "is_autocast_cpu_enabled",
    "get_autocast_dtype",
    "get_autocast_gpu_dtype",
    "get_autocast_cpu_dtype",
)
# the part of torch that reads dtypes on behalf of the model: clamp_probs takes finfo(dtype).eps
_DISTRIBUTIONS = "/torch/distributions/"


class NarrowedDimensions(Exception):
    """Raised if an export has to be repeated with smaller ranges."""

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        self.shapes = shapes  # the ``shapes`` argument of ``export_module`` with smaller ranges


def export_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, shapes: Any = None
) -> ExportedProgram:
    """Call ``torch.export`` with dimensions that may vary, if any.

    Raises:
        NarrowedDimensions: The model accepts a smaller range of sizes.
        TraceFailed: The model accepts a single size, or requires a relation between sizes.
    """
    if shapes is None:
        return torch.export.export(module, args, kwargs, strict=False)
    with _noting_fixed() as fixed:
        try:
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            if _VIOLATED not in text_of(error):
                raise
            narrowed = _with_suggested_ranges(error, shapes)
            if narrowed is not None:
                raise NarrowedDimensions(narrowed) from error
            raise _dimension_failure(error, fixed) from error


@contextmanager
def _noting_fixed() -> Iterator[_FixedLines]:
    """Record each dimension that becomes a number while active: the number, and the lines that fix it.

    These are the innermost line of the user's code, and the innermost line of a library that it calls.
    """
    fixed: _FixedLines = {}
    record = ShapeEnv._set_replacement

    def replace(env: Any, symbol: Any, target: Any, message: str) -> None:
        if getattr(target, "is_Integer", False):
            names = (env.source_name_to_debug_name.get(s.name) for s in env.var_to_sources.get(symbol, ()))
            for name in filter(None, names):
                stack = list(traceback.extract_stack())
                calls = [index for index, frame in enumerate(stack) if frame.filename == entry.__file__]
                below_model = stack[calls[-1] :] if calls else []
                fixed.setdefault(name, (int(target), *lines_of(below_model)))
        record(env, symbol, target, message)

    with patched((Replacement(ShapeEnv, "_set_replacement", replace),)):
        yield fixed


def _with_suggested_ranges(error: BaseException, shapes: Any) -> Any | None:
    """Narrow dimensions to the ranges that torch.export suggests; ``None`` if it suggests other changes."""
    text = text_of(error)
    ranges = {name: (int(low or 0), int(high or 0)) for name, low, high in _RANGE.findall(text)}
    if not ranges or _OTHER.search(text):
        return None

    def narrowed(dim: Any) -> Any:
        if not isinstance(dim, Dim) or dim.__name__ not in ranges:
            return dim
        low, high = ranges[dim.__name__]
        low, high = max(low, dim.min), min(high or dim.max, dim.max)
        return Dim(dim.__name__, min=low, max=high if isinstance(high, int) else None)

    result = pytree.tree_map(narrowed, shapes)
    return None if repr(result) == repr(shapes) else result


def _dimension_failure(error: BaseException, fixed: _FixedLines) -> TraceFailed:
    """Describe a dimension that the model does not let vary."""
    for name, (number, user_line, library) in fixed.items():
        place = f"{user_line.file}:{user_line.line}: " if user_line else ""
        code = f" at '{user_line.code}'" if user_line and user_line.code else ""
        inside = f", in {library_path(library.file)}:{library.line}" if library else ""
        return TraceFailed(
            f"{place}the dimension {name!r} cannot vary: the model fixes it to {number}{code}{inside}",
            hint="give every input that must have the same size the same name; or compute the number from "
            f"the input's shape; or leave {name!r} out of --dynamic",
        )
    relation = _OTHER.search(str(error))
    what = f"the model needs {relation[1]}" if relation else first_line(error)
    guard = _GUARD.search(str(error))
    if guard is not None:
        name, source, condition = guard.groups()
        what = f"not every {name} satisfies {condition.replace(source, name)}"
    return TraceFailed(
        f"the dimensions cannot vary freely: {what}",
        hint="give a range (NAME:LOW-HIGH), or fix that dimension",
    )


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The configuration of one trace."""

    rules: RuleSet  # of the policy
    author_rules: RuleSet  # inside an autocast region of the model's code (those of CUDA autocast)
    number_format: NumberFormat  # of the run, with 16 bits
    # measurements of a run, by site; empty before the first run
    measured: Mapping[SiteId, Measurement] = field(default_factory=dict)
    # decisions made on the whole graph, or in another trace of the model, by site
    planned: Mapping[SiteId, Decision] = field(default_factory=dict)
    # ops to rewrite, by site, to try a change of the model's code
    edits: Mapping[SiteId, Edit] = field(default_factory=dict)
    differentiated: bool = False  # whether to record where the model's code switches gradients off
    # whether to trace custom backwards of a model that returns its loss, or to report each as failed;
    # ``None`` if no gradients are requested
    follow_backward: bool | None = None
    # whether the model's code is not told that it is traced, as it may do something else then
    hidden: bool = True
    # seed of the random numbers that the model's code draws; ``None`` to continue the generators
    seed: int | None = None
    dynamic: Dimensions | None = None  # axes of each input tensor that may vary; ``None`` to fix all shapes
    # whether to trace along the path that the inputs take; their values matter then
    path: PathTracing = PathTracing.OFF
    known: Sequence[Site] = ()  # sites of the paths that other inputs take
    # FP32 values that decide the path; ``None`` for the inputs and the model as they are
    values: PathInputs | None = None

    @property
    def low_dtype(self) -> torch.dtype:
        """The 16-bit format as torch's dtype."""
        return torch_dtype(self.number_format)


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], config: TraceConfig
) -> TracedModel:
    """Export a model for inputs like these, with the casts that the configuration decides.

    The export runs under the casts themselves, on fake tensors that have the stored dtypes: code such as
    ``x.to(weight.dtype)`` or ``if x.dtype == torch.float16`` does what it will do after conversion. The model
    is in the mode (train or eval) to audit, and is not changed.

    Raises:
        TraceFailed: torch.export refuses the model; the message names the line.
    """
    file, low_dtype = config.rules.file, config.low_dtype
    path = PathRecorder() if config.path is PathTracing.ON else None
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    values = config.values or PathInputs(tensor_leaves(args, kwargs), {})
    reads = PrecisionReads()
    with quiet():
        convert = conversion_method(file.weights, low_dtype)
        tracer = None if config.follow_backward is None else BackwardTracer(config.follow_backward)
        storage = storage_of(model, file.weights, low_dtype)
        fake_model, hooks = make_fake_model(
            model, mode, storage.dtypes, convert, trained=config.differentiated, hooked=tracer is not None
        )
        entry = Entry(
            fake_model,
            args,
            kwargs,
            _dtype_of_placement(file.weights.outputs, low_dtype),
            reads.watching,
            None
            if tracer is None
            else lambda traced, output: _trace_backward(tracer, caster, traced, output, hooks),
            None if path is None else lambda fakes: path.begin(model, fake_model, fakes, values),
        )
    entry.train(model.training)
    for fake_module, module in zip(fake_model.modules(), model.modules(), strict=True):
        fake_module.training = module.training
    input_dtype = _dtype_of_placement(file.weights.inputs, low_dtype)
    inputs = tuple(
        fake_like(
            t, mode, input_dtype if input_dtype is not None and is_cast(t.dtype, file.weights) else t.dtype
        )
        for t in tensor_leaves(args, kwargs)
    )
    facts = FactFinder(entry, config.number_format.name, config.measured, storage.rounded)
    numbering = SiteNumbering if path is None else partial(PathNumbering, config.known)
    planned, edits = config.planned, config.edits
    caster = Caster(
        config.rules, config.author_rules, low_dtype, facts, planned, edits, defaultdict(numbering)
    )
    custom_code = CustomCode(tracer, current_layer)
    flag = TracingFlag(lambda file: is_tool_file(file) or is_library(file))
    casts_at_ops = bool(file.rules) and file.weights.storage != "lower"
    try:
        with (
            quiet(),
            caches_cleared_of_fakes(model),
            contextlib.nullcontext() if config.seed is None else seeded(config.seed),
            torch.set_grad_enabled(config.differentiated),
            autocast_visible(file.autocast, low_dtype),
            mixed_recurrent_inputs() if casts_at_ops else contextlib.nullcontext(),
            DispatchHook(caster, path).installed(),
            flag.installed() if path is None and config.hidden else contextlib.nullcontext(),
            custom_code.watched(),
            lazy_graph_modules(True),
        ):
            program = export_module(entry, inputs, shapes=config.dynamic and (config.dynamic,))
    except NarrowedDimensions as narrowed:
        return capture(model, args, kwargs, replace(config, dynamic=narrowed.shapes[0]))
    except AuditError:
        raise
    except (Exception, SystemExit) as error:
        if flag.is_hidden_from_model or TracingFlag.__name__ in str(error):  # code that takes only a bool
            return capture(model, args, kwargs, replace(config, hidden=False))
        if config.path is PathTracing.FALLBACK:
            return capture(model, args, kwargs, replace(config, path=PathTracing.ON))
        if tracer is not None and tracer.follow and tracer.records:
            return capture(model, args, kwargs, replace(config, follow_backward=False))
        raise trace_failure(error, model, args, kwargs, config.rules.name) from error
    graph = flat_graph(program)
    changes = tuple(_lasting_changes(entry.outputs.changes, program, graph))
    placeholders, tensors = _placeholders(program, graph, model, fake_model, names_of_tensors(args, kwargs))
    reads.lines += [] if convert is None else conversions_of(model)
    sites = build_sites(graph, placeholders)
    reads.lines += _aliasing_conversions(graph, sites)
    return TracedModel(
        graph=graph,
        placeholders=placeholders,
        tensors=tensors,
        sites=sites,
        outputs=entry.outputs.names,
        structure=entry.outputs.structure,
        paths=entry.outputs.paths,
        signature=input_signature(args, kwargs),
        changes=changes,
        random_constants=entry.outputs.random_constants,
        policy=config.rules.name,
        dtype=low_dtype,
        notes=(
            *storage_notes(model, file.weights, low_dtype),
            *_state_notes(changes, entry.outputs.random_constants),
        ),
        clip=file.weights.clip,
        split_ties=storage.split_ties,
        custom_functions=tuple(custom_code.names),
        custom_backwards=() if tracer is None else tuple(tracer.backwards),
        backward_notes=(*custom_code.notes, *(_unseen_hooks(model) if tracer is not None else ())),
        reads=tuple(reads.lines),
        path=None if path is None else tuple(path.reads.reads),
        rounded=storage.rounded,
    )


def _trace_backward(
    tracer: BackwardTracer, caster: Caster, model: nn.Module, output: Any, hooks: Mapping[str, Sequence[Any]]
) -> None:
    """Trace custom backwards from the loss, outside autocast, as training code runs them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, functions in hooks.items():
        for function in functions:
            tracer.hook(parameters[name], function, layer_path(name).rpartition(".")[0])

    @contextlib.contextmanager
    def within(name: str) -> Iterator[None]:
        with caster.in_backward(name), same_module():
            yield

    loss = flatten_outputs(output)[-1][1]
    with autocast_visible(False, caster.dtype):
        tracer.trace(loss, list(parameters.values()), within)


def _unseen_hooks(model: nn.Module) -> Iterator[str]:
    """Yield a note for each kind of hook that a trace cannot follow."""
    if any(module._backward_hooks and module._is_full_backward_hook is False for module in model.modules()):
        yield "backward hooks from Module.register_backward_hook are not followed"
    if any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()):
        yield AFTER_ACCUMULATION


def _dtype_of_placement(placement: str, low_dtype: torch.dtype) -> torch.dtype | None:
    return {"lower": low_dtype, "float32": torch.float32}.get(placement)


def input_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a batch; batches with equal signatures can share a trace."""
    return tuple((tuple(t.shape), t.dtype) for t in tensor_leaves(args, kwargs))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Redirect prints of the model's code to stderr, and silence logs and warnings.

    When tracing fails, torch prints an unfinished graph and a traceback that repeat the raised error.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with output_captured() as printed:
            yield
    finally:
        logging.disable(before)
    sys.stderr.write(printed.getvalue())


def _placeholders(
    program: ExportedProgram,
    graph: fx.Graph,
    model: nn.Module,
    fake_model: nn.Module,
    inputs: Sequence[str],
) -> tuple[tuple[Placeholder, ...], dict[str, torch.Tensor]]:
    real = {layer_path(name): tensor for name, tensor in named_tensors(model).items()}
    masters = constant_masters(model, fake_model)
    registered = {storage_id(fake): (layer_path(n), fake) for n, fake in named_tensors(fake_model).items()}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    slots: list[Placeholder] = []
    tensors: dict[str, torch.Tensor] = {}
    names = iter(inputs)
    for node in graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        slot = _SLOTS[spec.kind]
        if slot is Slot.CONSTANT and not node.users:
            graph.erase_node(node)  # remains of a composite op that was split (nn.LSTM), without values
            continue
        name = next(names) if slot is Slot.INPUT else layer_path(str(spec.target))
        if slot is not Slot.INPUT:
            constant = program.constants.get(str(spec.target))
            if isinstance(constant, FakeTensor) and storage_id(constant) in registered:
                # the code reads it from a list, an object or a closure
                name, node.meta["val"] = registered[storage_id(constant)]
                slot = Slot.PARAMETER if isinstance(real[name], nn.Parameter) else Slot.BUFFER
            tensor = real[name] if name in real else masters.get(id(constant), constant)
            assert isinstance(tensor, torch.Tensor), tensor
            tensors[node.name] = tensor
        slots.append(Placeholder(node.name, slot, name, node_dtype(node)))
    return tuple(slots), tensors


def _lasting_changes(
    changes: Sequence[StateChange], program: ExportedProgram, graph: fx.Graph
) -> Iterator[StateChange]:
    """Yield the changes that a later call may read, without tensors that each call recomputes."""
    used = {node.name for node in graph.find_nodes(op="placeholder") if node.users}
    specs = [spec for spec in program.graph_signature.input_specs if spec.arg.name in used]
    read = {id(program.constants.get(str(spec.target))) for spec in specs}
    for change in changes:
        if change.plain:
            yield change
        elif change.stale is None or any(id(tensor) in read for tensor in change.stale):
            yield StateChange(change.number, change.name, None, None, plain=False)


def _state_notes(changes: Sequence[StateChange], random_constants: bool) -> tuple[str, ...]:
    """Explain why the trace is valid for this call only."""
    plain = ", ".join(change.name for change in changes if change.plain)
    stored = ", ".join(change.name for change in changes if not change.plain)
    notes = [f"forward changes {plain}: traced again for each of its values"] if plain else []
    if random_constants:
        notes.append("forward draws Python's or NumPy's random numbers: each call is traced again")
    if stored:
        notes.append(f"forward stores tensors or objects in {stored}: each call is traced without them")
    return tuple(notes)


class PrecisionReads(TorchFunctionMode):
    """Collects the lines of the model's code that read a 16-bit precision.

    Reading a dtype only to create or cast another tensor does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[SourceLine] = []  # distinct source lines in order
        self._visited: set[tuple[Any, int]] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and record it if it reveals a 16-bit dtype."""
        del types
        # x.type(dtype) is a cast, and x[index] = tensor copies
        casts = func is torch.Tensor.type and len(args) > 1
        copies = func is torch.Tensor.__setitem__ and isinstance(args[2], torch.Tensor)
        tells = func in _DTYPE_READS and not casts and not copies
        if tells:
            with without_torch_function():
                low_precision = any(
                    isinstance(arg, torch.Tensor) and arg.dtype in LOW_PRECISION_DTYPES for arg in args
                )
            if low_precision:
                self._note(sys._getframe(1), dtype=func == _DTYPE)
        return func(*args) if kwargs is None else func(*args, **kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch tensors and torch's autocast functions while active."""
        replacements = [Replacement(torch, name, self._observed(getattr(torch, name))) for name in _AUTOCAST]
        with patched(replacements), self:
            yield

    def _observed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        enabled = torch.is_autocast_enabled

        def ask(*args: Any) -> Any:
            answer = function(*args)
            if answer is True or (isinstance(answer, torch.dtype) and (enabled("cpu") or enabled("cuda"))):
                self._note(sys._getframe(1), dtype=False)
            return answer

        return ask

    def _note(self, frame: FrameType | None, *, dtype: bool) -> None:
        while frame is not None and _is_dispatch(frame):
            frame = frame.f_back
        if frame is not None and _DISTRIBUTIONS in frame.f_code.co_filename:
            while frame is not None and is_tool_file(frame.f_code.co_filename):
                frame = frame.f_back
        if frame is None or is_tool_file(frame.f_code.co_filename):
            return
        key = (frame.f_code, frame.f_lasti)
        if key in self._visited:
            return
        self._visited.add(key)
        if not (dtype and _only_makes_tensors(*key)):
            line = code_line(frame.f_code.co_filename, frame.f_lineno)
            if line not in self.lines:
                self.lines.append(line)


def conversions_of(model: nn.Module) -> list[SourceLine]:
    """Return user-defined conversion methods, which may change more than dtypes."""
    methods = (
        getattr(type(m), name) for m in model.modules() for name in ("half", "bfloat16", "to", "_apply")
    )
    codes = dict.fromkeys(method.__code__ for method in methods if hasattr(method, "__code__"))
    files = ((code.co_filename, code.co_firstlineno) for code in codes)
    return [code_line(file, line) for file, line in files if not is_library(file) and not is_tool_file(file)]


def _aliasing_conversions(graph: fx.Graph, sites: Sequence[Site]) -> Iterator[SourceLine]:
    """Yield conversions whose operand or result is written before the other is read.

    In FP32 they return their operand itself, so that both are written.
    """
    lines = {site.node: site.source for site in sites if site.role is Role.CAST}
    if not lines:
        return
    shared = SharedMemory(graph)
    last_read: dict[int, int] = {}  # by memory, as are the writes
    writes: defaultdict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        for source in node.all_input_nodes:
            last_read |= dict.fromkeys(shared.of(source.meta.get("val")), index)
        if isinstance(node.target, OpOverload) and (positions := mutated_arguments(node.target)):
            names = argument_names(node.target)
            arguments = named_arguments(node.target, *fake_arguments(node))
            for memory in shared.of([arguments.get(names[position]) for position in positions]):
                writes[memory].append(index)
    for index, node in enumerate(graph.nodes):
        line = lines.get(node.name)
        if line is None or not inexact(node.args[0].meta["val"]):
            continue
        pairs = permutations((shared.of(node.args[0].meta["val"]), shared.of(node.meta["val"])))
        if any(
            index < at < last_read.get(other, 0)
            for first, second in pairs
            for memory, other in product(first, second)
            for at in writes[memory]
        ):
            yield line


def _is_dispatch(frame: FrameType) -> bool:
    """Return whether a frame belongs to torch's dispatch from a tensor to function modes."""
    file = frame.f_code.co_filename
    return frame.f_code.co_name == "__torch_function__" or file.endswith(
        ("/torch/overrides.py", "/torch/_tensor.py")
    )


# methods and functions whose result has the dtype of an argument; torch.tensor is not one of them, because
# its constants are rounded while the model is traced
_CASTS = frozenset({"to", "type"})
_FACTORIES = frozenset(
    """
    to zeros ones full empty arange linspace eye rand randn randint
    zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
    softmax log_softmax sum mean prod cumsum cumprod
    """.split()
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _only_makes_tensors(code: CodeType, instruction: int) -> bool:
    """Return whether the dtype read at ``frame.f_lasti`` is only passed to casts and factory functions.

    ``x.to(other.dtype)`` and ``torch.zeros(n, dtype=x.dtype)`` are casts of the graph, which the FP32 run
    widens. ``x.dtype == torch.float16`` and ``torch.finfo(x.dtype)`` may change what the code computes, and
    so may anything that is not recognized here.
    """
    function, shift = _function(code)
    position = next(islice(code.co_positions(), instruction // 2, None), None)
    if function is None or position is None:
        return False
    line, _, column, end = position
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    for node in parents:
        if isinstance(node, ast.Attribute) and node.attr == "dtype" and node.end_lineno is not None:
            place = node.lineno + shift, node.col_offset, node.end_col_offset
            if place == (line, column, end):
                return _only_in_casts(node, parents, frozenset())
    return False


def _function(code: CodeType) -> tuple[_Function | None, int]:
    """Return the syntax tree of a function and its line offset, if its source is known."""
    last = max((end for _, end, _, _ in code.co_positions() if end is not None), default=0)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    # wrap an indented function in a block, so that columns are those of the file
    nested = bool(lines) and lines[0][:1].isspace()
    try:
        tree = ast.parse(("if True:\n" if nested else "") + "".join(lines))
    except (SyntaxError, ValueError):
        return None, 0
    function = next((node for node in ast.walk(tree) if isinstance(node, _Function)), None)
    return function, code.co_firstlineno - (2 if nested else 1)


def _only_in_casts(node: ast.expr, parents: dict[ast.AST, ast.AST], followed: frozenset[str]) -> bool:
    parent = parents[node]
    if isinstance(parent, ast.Expr):
        return True
    if isinstance(parent, ast.Call):
        return node is not parent.func and _callee(parent) in _CASTS
    if isinstance(parent, ast.keyword) and parent.arg == "dtype":
        call = parents[parent]
        return isinstance(call, ast.Call) and _callee(call) in _FACTORIES
    name = _assigned(node, parent, parents)
    is_global = any(isinstance(n, ast.Global | ast.Nonlocal) and name in n.names for n in parents)
    if name is None or name in followed or is_global:
        return name in followed
    names = (n for n in parents if isinstance(n, ast.Name) and n.id == name)
    uses = [n for n in names if isinstance(n.ctx, ast.Load)]
    return all(_only_in_casts(use, parents, followed | {name}) for use in uses)


def _callee(call: ast.Call) -> str:
    """Return the name of a method or of a module's function."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _assigned(node: ast.expr, parent: ast.AST, parents: dict[ast.AST, ast.AST]) -> str | None:
    """Return the variable that a value is assigned to, alone or in ``dtype, n = x.dtype, len(x)``."""
    target: ast.AST | None = None
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        target = parent.targets[0]
    elif isinstance(parent, ast.Tuple) and isinstance(statement := parents[parent], ast.Assign):
        names = statement.targets[0] if len(statement.targets) == 1 else None
        if isinstance(names, ast.Tuple) and len(names.elts) == len(parent.elts):
            target = names.elts[parent.elts.index(node)]
    return target.id if isinstance(target, ast.Name) else None
