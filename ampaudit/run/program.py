"""Compiles a graph into steps, resolving everything that does not depend on the batch."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.errors import first_line
from ampaudit.core.ops import having
from ampaudit.run.low_precision import differs_from_one_rounding
from ampaudit.trace.flow import StackChoice, stack_choices
from ampaudit.trace.functional import LAST_VALUES, OnCopy, for_any_strides, overload_of
from ampaudit.trace.graph import Role, Site, Slot, TracedModel
from ampaudit.trace.opnames import (
    argument_names,
    base_name,
    is_foreign,
    mutated_arguments,
    named_arguments,
    returned_arguments,
    written_arguments,
    written_values,
)
from ampaudit.trace.replay import META_KEY
from ampaudit.trace.values import (
    LOW_PRECISION_DTYPES,
    SharedMemory,
    computing_dtype,
    converted_numbers,
    fake_arguments,
    is_converted,
    node_dtype,
    widened,
)

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]

# larger groups keep more values of the reference alive and gain little
GROUP_SIZE = 8


def passes_gradients(node: fx.Node) -> bool:
    """Return whether gradients pass a node, that is, the model's code has not disabled them there.

    Casts inserted by the policy always pass them, since ops outside ``no_grad`` may share a cast.
    """
    record = node.meta.get(META_KEY)
    return record is None or record.inserted or not record.no_grad


@dataclass(frozen=True, slots=True)
class Step:
    """One node, prepared for execution."""

    node: fx.Node  # the graph's node
    target: Callable[..., Any]  # the function to call
    site: Site | None  # the site of the node; ``None`` for tuple access and shape arithmetic
    args: tuple[Any, ...]  # arguments on the run's device, with nodes in the places of values
    kwargs: dict[str, Any]  # the same for keyword arguments
    # ``args`` and ``kwargs`` with every 16-bit dtype constant replaced by float32
    float32_arguments: CallArguments
    emulated_arguments: CallArguments  # the same with the numbers that a kernel for 16-bit tensors reads
    computing: torch.dtype | None  # the 16-bit dtype to which operands are converted, if any
    # positions and names of the tensors that are converted to ``computing``
    converted_operands: frozenset[int | str]
    # dtypes of its outputs in the converted model; ``None`` for outputs that are not tensors
    dtypes: tuple[torch.dtype | None, ...]
    mutates: tuple[int, ...]  # positions of the arguments that it writes to
    # positions and dtypes of written arguments other than its result (running statistics)
    updates: tuple[tuple[int, torch.dtype], ...]
    random: bool  # whether it draws random numbers
    rounds_inside: bool  # whether its 16-bit kernel differs from a float32 call that is rounded once
    frees: tuple[fx.Node, ...]  # nodes whose values are not needed after this step
    decides: bool = False  # whether it turns floats into integers, booleans or whole numbers
    choice: StackChoice | None = None  # the stack of matrices that it indexes by a tensor, if any

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that the step writes to, as nodes or values."""
        op = self.node.target
        return written_values(op, args, kwargs) if self.mutates and isinstance(op, OpOverload) else []

    def written_at(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument at a position of the schema, as a node or value; ``None`` if omitted."""
        assert isinstance(self.node.target, OpOverload)
        name = argument_names(self.node.target)[position]
        return args[position] if position < len(args) else kwargs.get(name)

    def mapped(self, result: Any, function: Callable[[torch.Tensor, torch.dtype | None], Any]) -> Any:
        """Apply a function of a tensor and its dtype in the converted model to each tensor of a result."""
        if isinstance(result, torch.Tensor):
            return function(result, self.dtypes[0])
        if not isinstance(result, list | tuple):
            return result
        items = zip(result, self.dtypes, strict=True)
        return type(result)([function(x, d) if isinstance(x, torch.Tensor) else x for x, d in items])

    @property
    def low_precision(self) -> bool:
        """Whether an output is a 16-bit float."""
        return any(dtype in LOW_PRECISION_DTYPES for dtype in self.dtypes)

    @property
    def rounds(self) -> bool:
        """Whether an output, or an operand that the step converts, is in 16 bits."""
        return self.low_precision or self.computing is not None

    @property
    def in_place(self) -> bool:
        """Whether the result is the written argument."""
        return len(self.mutates) > len(self.updates)

    @property
    def makes_values(self) -> bool:
        """Whether the step computes values, rather than view or select those of its inputs."""
        return self.site is not None and self.site.role not in (Role.VIEW, Role.SELECT)

    @property
    def observed(self) -> bool:
        """Whether the step computes real or complex values."""
        if self.site is None or not self.makes_values:
            return False
        dtypes = (*self.dtypes, *(dtype for _, dtype in self.updates))
        return any(d is not None and (d.is_floating_point or d.is_complex) for d in dtypes)


@contextlib.contextmanager
def noting_source_line(step: Step) -> Iterator[None]:
    """Add the line of the model's code to errors of torch and of third-party kernels."""
    op = step.node.target
    try:
        yield
    except Exception as error:
        from_torch = isinstance(error, RuntimeError | IndexError)
        if not from_torch and not (isinstance(op, OpOverload) and is_foreign(op)):
            raise
        reported = error if from_torch else RuntimeError(f"{op}: {type(error).__name__}: {first_line(error)}")
        if step.site is not None and step.site.source is not None:
            reported.add_note(f"{step.site.source.file}:{step.site.source.line}")
        raise reported from (None if from_torch else error)


@dataclass(frozen=True, slots=True)
class MemoryVersion:
    """Memory after a number of writes to it; ``root`` is a node that stands for it."""

    root: fx.Node
    writes: int


NodeOrMemory: TypeAlias = "fx.Node | MemoryVersion"


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled graph."""

    traced: TracedModel  # the traced model
    inputs: tuple[fx.Node, ...]  # placeholders, in order
    steps: tuple[Step, ...]  # all calls, in graph order
    # the same calls in groups of a few: the reference computes a whole group first, while its values are in
    # the cache. A call that writes memory or draws random numbers is its own group
    groups: tuple[tuple[Step, ...], ...]
    outputs: tuple[fx.Node, ...]  # nodes of the model's outputs
    written: frozenset[fx.Node]  # nodes whose memory some step writes to, or that may share such memory
    # for a node, or the output: the written memory that it reads by a way other than the result of the last
    # write, such as a view; for memory: the node that wrote it last, and the memory before that
    writers: Mapping[NodeOrMemory, tuple[NodeOrMemory, ...]]
    # last value of each buffer for which a graph without in-place writes computes a new one
    updated: Mapping[fx.Node, fx.Node]
    parameters: frozenset[fx.Node]  # placeholders of parameters
    data: frozenset[fx.Node]  # inputs of floating-point numbers

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers."""
        return any(step.random for step in self.steps)

    def memory_after(self) -> dict[NodeOrMemory, list[MemoryVersion]]:
        """Return the memory after each write, by the node that writes."""
        memory: dict[NodeOrMemory, list[MemoryVersion]] = {}
        for value, sources in self.writers.items():
            if isinstance(value, MemoryVersion):
                memory.setdefault(sources[0], []).append(value)
        return memory

    def sources(self, value: NodeOrMemory) -> tuple[NodeOrMemory, ...]:
        """Return what a value, or the content of memory, depends on directly."""
        inputs = value.all_input_nodes if isinstance(value, fx.Node) else ()
        return (*inputs, *self.writers.get(value, ()))

    def free_of(self, data: Set[fx.Node]) -> set[NodeOrMemory]:
        """Return the values that depend on none of these inputs and on no parameter."""
        free: set[NodeOrMemory] = set()
        memory_after = self.memory_after()
        varying = data | self.parameters
        for node in self.traced.graph.nodes:
            values = (node, *memory_after.get(node, ()))
            free.update(
                value for value in values if value not in varying and free.issuperset(self.sources(value))
            )
        return free


def compile_program(traced: TracedModel, device: torch.device) -> Program:
    """Compile a graph into steps in graph order; each value is freed after its last use.

    Constants that name the model's device are changed to the device of the run.
    """
    graph, sites = traced.graph, traced.site_of_node
    outputs = tuple(graph.output_node().all_input_nodes)
    buffers = {place.node for place in traced.placeholders if place.slot is Slot.BUFFER}
    last = graph.output_node().meta.get(LAST_VALUES, {})
    updated = {node: value for node, value in last.items() if node.name in buffers}
    frees = _last_uses(graph, frozenset((*outputs, *updated.values())))
    choices = stack_choices(traced)
    steps = tuple(
        _compile_step(node, sites.get(node.name), frees.get(node, ()), device, choices.get(node))
        for node in graph.nodes
        if node.op == "call_function"
    )
    written_nodes, writers = _written_nodes(steps)
    places = {place.node: place for place in traced.placeholders}
    inputs = tuple(graph.find_nodes(op="placeholder"))
    return Program(
        traced=traced,
        inputs=inputs,
        steps=steps,
        groups=_grouped(steps, written_nodes),
        outputs=outputs,
        written=written_nodes,
        writers=writers,
        updated=updated,
        parameters=frozenset(n for n in inputs if places[n.name].slot is Slot.PARAMETER),
        data=frozenset(n for n in inputs if places[n.name].slot is Slot.INPUT and places[n.name].is_float),
    )


def _written_nodes(
    steps: Sequence[Step],
) -> tuple[frozenset[fx.Node], dict[NodeOrMemory, tuple[NodeOrMemory, ...]]]:
    """Return all nodes that may share memory with one that some step writes to, and the writers."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    targets: list[fx.Node] = []
    if not any(map(_write_targets, steps)):
        return frozenset(), {}
    memory = SharedMemory(steps[0].node.graph)
    for step in steps:
        root(step.node)
        storages = memory.of(step.node.meta.get("val"))
        for source in step.node.all_input_nodes:
            root(source)
            # some ops return views although their schema does not say so, such as atleast_3d
            if not storages.isdisjoint(memory.of(source.meta.get("val"))):
                parent[root(step.node)] = root(source)
        # views share memory by definition; a cast returns its own input where the dtypes agree, as always in
        # the float32 reference; the nodes that unpack lists of views are not sites
        if step.site is None or step.site.role is Role.VIEW or step.site.role.converts:
            for source in step.node.all_input_nodes[:1]:
                parent[root(step.node)] = root(source)
        for target in _write_targets(step):
            parent[root(step.node)] = root(target)
            targets.append(target)
    roots = {root(node) for node in targets}
    written = frozenset(node for node in list(parent) if root(node) in roots)
    return written, _writers(steps, {node: root(node) for node in written})


def _writers(
    steps: Sequence[Step], roots: Mapping[fx.Node, fx.Node]
) -> dict[NodeOrMemory, tuple[NodeOrMemory, ...]]:
    """Return the sources of each state of written memory, and the states that nodes depend on.

    ``roots`` stand for the memory of each node that may be written to. A node that reads the result of the
    last write, which reads that of the write before, depends on all of them already.
    """
    passed: dict[fx.Node, int] = {}  # the writes that a value has gone through
    states: dict[fx.Node, MemoryVersion] = {}  # the last of each root
    writers: dict[NodeOrMemory, tuple[NodeOrMemory, ...]] = {}
    output = steps[0].node.graph.output_node()
    for node, step in [*((step.node, step) for step in steps), (output, None)]:
        sources = [source for source in node.all_input_nodes if roots.get(source) in states]
        needed = {states[roots[s]]: None for s in sources if passed.get(s, 0) < states[roots[s]].writes}
        if needed:
            writers[node] = tuple(needed)
        targets = [] if step is None else _write_targets(step)
        if step is not None and (targets or not step.makes_values):
            passed[node] = max((passed.get(s, 0) for s in node.all_input_nodes[:1]), default=0) + len(targets)
        for target in targets:
            root = roots[target]
            before = states.get(root)
            states[root] = MemoryVersion(root, 1 if before is None else before.writes + 1)
            writers[states[root]] = (node,) if before is None else (node, before)
    return writers


def _write_targets(step: Step) -> list[fx.Node]:
    """Return the nodes that a step writes to."""
    arguments = step.written(step.node.args, dict(step.node.kwargs))
    return [value for value in arguments if isinstance(value, fx.Node)]


def _grouped(steps: tuple[Step, ...], written_nodes: frozenset[fx.Node]) -> tuple[tuple[Step, ...], ...]:
    groups: list[list[Step]] = []
    open_group = False
    for step in steps:
        alone = bool(step.mutates) or step.random or step.node in written_nodes
        if alone or not open_group or len(groups[-1]) == GROUP_SIZE:
            groups.append([])
        groups[-1].append(step)
        open_group = not alone
    return tuple(tuple(group) for group in groups)


def call_on(node: fx.Node, device: torch.device) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return target, args and kwargs of a traced op with its devices, except ``meta``, replaced."""

    def here(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type != "meta" else value

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), here)
    return for_any_strides(node.target), args, dict(kwargs)


def _compile_step(
    node: fx.Node,
    site: Site | None,
    frees: tuple[fx.Node, ...],
    device: torch.device,
    choice: StackChoice | None,
) -> Step:
    overload = overload_of(node.target)
    value = node.meta.get("val")
    outputs = value if isinstance(value, list | tuple) else (value,)
    target, args, kwargs = call_on(node, device)
    on_copy = isinstance(node.target, OnCopy)
    mutates = written_arguments(overload, node.args, dict(node.kwargs)) if overload and not on_copy else ()
    dtypes = tuple(getattr(item, "dtype", None) for item in outputs)
    is_view = site is not None and site.role is Role.VIEW
    random = overload is not None and draws(overload, args, kwargs) and not is_view
    sources = pytree.tree_leaves([source.meta.get("val") for source in (node, *node.all_input_nodes)])
    low = any(getattr(item, "dtype", None) in LOW_PRECISION_DTYPES for item in sources)
    wide: CallArguments = widened((args, kwargs))
    computing, converted, emulated = _low_operands(node, overload, wide)
    return Step(
        node=node,
        target=_Zeroed(overload)
        if overload is not None and base_name(overload) in having("uninitialized")
        else target,
        site=site,
        args=args,
        kwargs=kwargs,
        float32_arguments=wide,
        emulated_arguments=emulated,
        computing=computing,
        converted_operands=converted,
        dtypes=dtypes,
        mutates=mutates,
        updates=_updates(node, overload, mutates) if overload else (),
        random=random,
        rounds_inside=overload is not None
        and not random
        and low
        and differs_from_one_rounding(overload, *fake_arguments(node)),
        frees=frees,
        decides=overload is not None and _decides(node, overload, outputs),
        choice=choice,
    )


def _decides(node: fx.Node, overload: OpOverload, outputs: Any) -> bool:
    """Return whether an op turns floats into integers, booleans or whole numbers."""
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    if not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in inputs):
        return False
    if base_name(overload).rstrip("_") in having("whole_number"):
        return True
    tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
    return any(not (value.is_floating_point() or value.is_complex()) for value in tensors)


def _updates(
    node: fx.Node, overload: OpOverload, mutates: tuple[int, ...]
) -> tuple[tuple[int, torch.dtype], ...]:
    """Return positions and converted dtypes of the written arguments that are not the result."""
    updates: list[tuple[int, torch.dtype]] = []
    arguments = named_arguments(overload, node.args, dict(node.kwargs))
    for position in set(mutates) - set(returned_arguments(overload)):
        target = arguments.get(argument_names(overload)[position])
        dtype = node_dtype(target)
        if dtype is not None:
            updates.append((position, dtype))
    return tuple(sorted(updates, key=operator.itemgetter(0)))


def _low_operands(
    node: fx.Node, op: OpOverload | None, wide: CallArguments
) -> tuple[torch.dtype | None, frozenset[int | str], CallArguments]:
    """Return the 16-bit dtype to which an op converts operands, their positions, and its arguments."""
    fake = fake_arguments(node)
    computing = computing_dtype(op, *fake) if op is not None else None
    if op is None or computing is None:
        return None, frozenset(), wide
    operands: list[tuple[int | str, Any]] = [*enumerate(fake[0]), *fake[1].items()]
    tensors = frozenset(key for key, value in operands if is_converted(value, computing))
    low = converted_numbers(op, *wide, computing)
    return computing if tensors or low != wide else None, tensors, low


class _Zeroed:
    """Wraps an op that returns uninitialized memory and zeroes it, so that both runs agree."""

    def __init__(self, op: OpOverload) -> None:
        self._op = op

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        initialized = args[0].numel() if mutated_arguments(self._op) else 0
        tensor: torch.Tensor = self._op(*args, **kwargs)
        tensor.view(-1)[initialized:].zero_() if initialized else tensor.zero_()
        return tensor


def draws(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = named_arguments(target, args, kwargs)
    return arguments.get("dropout_p", 0.0) != 0.0 if "dropout_p" in argument_names(target) else True


def _last_uses(graph: fx.Graph, outputs: frozenset[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            last.setdefault(node, node)
            for used in node.all_input_nodes:
                last[used] = node
    frees: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        if value not in outputs:
            frees.setdefault(user, []).append(value)
    return {user: tuple(values) for user, values in frees.items()}
