"""Runs the reference and the converted graph together, node by node, and passes each pair to an observer.

Policies insert different casts into one model; the rest of their graphs is mostly the same. So the runs
proceed side by side, the first a step ahead. An op that receives the very tensors that the first run passed
to the same op reuses its result. Where the graphs differ (code that checks a dtype), so do the inputs, and
the op is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId
from ampaudit.run.backends import Backend, Float32Backend
from ampaudit.run.device import random_state, restore_random_state
from ampaudit.run.program import Program, Step, noting_source_line
from ampaudit.run.segments import weights_by_group
from ampaudit.trace.converted import ConvertedModel, Release
from ampaudit.trace.graph import Placeholder, Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES, inexact, node_dtype

Pair = tuple[Any, Any]
MISSING = object()


class Observer:
    """Observes the values of each step; the base class ignores them."""

    __slots__ = ()

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Observe a pair: two tensors, or two sequences with an entry per item of ``step.dtypes``.

        The 16-bit run continues with the returned value (normally ``value`` itself).
        """
        return value


class WrappedObserver(Observer):
    """Passes everything on to another observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Return the value that the other observer returns."""
        return self._observer.observe(step, reference, value, call)


class StepCall:
    """The resolved arguments of one step, so that observers can call it again."""

    __slots__ = ("_template", "args", "computed_once", "inputs", "kwargs", "resized", "state")

    def __init__(
        self,
        inputs: dict[fx.Node, Pair],
        step: Step,
        reference: Float32Backend,
        backend: Backend,
        *,
        computed_once: bool,
    ) -> None:
        self.inputs = inputs
        self.computed_once = computed_once  # the two runs make the same call on the same tensors
        self.state: torch.Tensor | None = None  # random state before the call, if it draws random numbers
        self.resized: str | None = None  # sizes that the 16-bit run's own choices would have produced
        self._template = reference.arguments(step)
        arguments = (reference if computed_once else backend).arguments(step)
        self.args, self.kwargs = resolved(arguments, inputs, 1)

    def updates(self, step: Step) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return the position and both values of written arguments other than the result."""
        if not step.updates:
            return []
        args, kwargs = resolved(self._template, self.inputs, 0)
        at = step.written_at
        return [(p, at(p, args, kwargs), at(p, self.args, self.kwargs)) for p, _ in step.updates]

    @property
    def ref_args(self) -> tuple[Any, ...]:
        """Positional arguments of the reference's call."""
        args: tuple[Any, ...] = resolved(self._template[0], self.inputs, 0)
        return args


def resolved(template: Any, inputs: dict[fx.Node, Pair], side: int) -> Any:
    """Replace nodes by their values in the reference (side 0) or the 16-bit run (side 1)."""
    return fx.node.map_arg(template, lambda node: inputs[node][side])


@dataclass(frozen=True, slots=True)
class CarriedState:
    """The inputs of the 16-bit run, and the values that earlier calls left in the buffers, by name."""

    inputs: Sequence[torch.Tensor]
    buffers: Mapping[str, Pair] = field(default_factory=dict)


@dataclass(slots=True)
class GraphState:
    """The state of a run between two groups of steps."""

    values: dict[fx.Node, Pair]  # live values of both runs
    buffers: dict[fx.Node, Pair] = field(default_factory=dict)  # the model's buffers, which outlive the run
    group: int = 0  # index of the next group


class LockStep:
    """Runs one converted model on one device; keeps weights, but no activations, between runs.

    With ``converted_only``, the reference is skipped where the 16-bit run does not need it. With
    ``by_segment``, weights are moved to the device only when held or used.
    """

    def __init__(
        self,
        program: Program,
        converted: ConvertedModel,
        backend: Backend,
        device: torch.device,
        *,
        reference_only: bool = False,
        converted_only: bool = False,
        by_segment: bool = False,
    ) -> None:
        self.program = program
        self.buffers: dict[fx.Node, Pair] = {}  # those that the last run wrote
        self._reference_only = reference_only
        # the graph of a path needs FP32's choices
        self._converted_only = converted_only and program.traced.path is None and not program.written
        self.backend = backend
        self.device = device
        self.converted = converted
        self._reference = Float32Backend()
        self._places = {p.node: p for p in program.traced.placeholders}
        self.weights = MasterWeights(converted.masters, device, converted.release, on_demand=by_segment)

    @cached_property
    def weight_reads(self) -> list[frozenset[str]]:
        """The weights that each group of steps reads, by placeholder."""
        return weights_by_group(self.program)

    @property
    def placed(self) -> ConvertedModel:
        """The model with its weights on the device, so that another executor need not move them again."""
        return replace(self.converted, masters=self.weights.all)

    @torch.no_grad()
    def run(
        self, inputs: list[torch.Tensor], observer: Observer, carried: CarriedState | None = None
    ) -> list[Pair]:
        """Run one batch; return the pairs of outputs in graph order.

        A value is dropped after its last use; calls that are the same in both runs are made once.
        """
        return self._run_to_end(self.start(inputs, carried), observer)

    @torch.no_grad()
    def run_pairs(self, pairs: list[Pair], observer: Observer) -> list[Pair]:
        """Run one batch whose inputs already differ between the runs."""
        values = dict(zip(self.program.inputs, pairs, strict=True))
        for node in values.keys() & self.program.written:
            values[node] = (values[node][0].clone(), values[node][1].clone())
        return self._run_to_end(self._state(values), observer)

    def _run_to_end(self, state: GraphState, observer: Observer) -> list[Pair]:
        outputs = Interleaved([(self, state, observer)]).advance()
        assert outputs is not None, "no run stops early"
        return outputs[0]

    def proceed(
        self, state: GraphState, observer: Observer, shared: SharedReference | None = None
    ) -> Generator[tuple[Step, ...], None, list[Pair]]:
        """Continue a run from a state, yielding before each group of steps; gradients must be off.

        Between two groups, the values may be moved elsewhere and back.
        """
        values = state.values
        while state.group < len(self.program.groups):
            group = self.program.groups[state.group]
            yield group
            rng_state = random_state(self.device) if group[0].random else None
            references = self._references(group, values, shared)
            for step, reference in zip(group, references, strict=True):
                inputs_of = {node: self._value(node, values) for node in step.node.all_input_nodes}
                values[step.node] = self._run_step(step, inputs_of, reference, rng_state, observer)
                del inputs_of
                for node in step.frees:
                    pair = values.pop(node, None)
                    self.weights.free(node.name, None if pair is None else pair[0])
            del references
            state.group += 1
        last = {node: self._value(value, values) for node, value in self.program.updated.items()}
        self.buffers = state.buffers | last
        return [self._value(node, values) for node in self.program.outputs]

    def _references(
        self, group: tuple[Step, ...], values: dict[fx.Node, Pair], shared: SharedReference | None
    ) -> list[Any]:
        """Compute the reference's results of a group of steps."""
        if self._converted_only:
            return [None] * len(group)
        is_first = shared is not None and shared.programs[0] is self.program
        leads, follows = (shared, None) if is_first else (None, shared)
        results: dict[fx.Node, Any] = {}
        for step in group:
            sides: dict[fx.Node, Pair] = {}
            for node in step.node.all_input_nodes:
                if node in results:
                    sides[node] = (results[node], None)
                elif node in values:
                    sides[node] = values[node]
                else:
                    sides[node] = (self._reference_weight(node), None)
            args, kwargs = resolved(self._reference.arguments(step), sides, 0)
            result = MISSING
            if follows is not None:
                result = follows.take(step, self.program, args, kwargs)
            if result is MISSING:
                with noting_source_line(step):
                    result = self._reference.call(step, args, kwargs)
            if leads is not None:
                leads.offer(step, self.program, args, kwargs, result)
            results[step.node] = result
        return list(results.values())

    def _run_step(
        self,
        step: Step,
        inputs: dict[fx.Node, Pair],
        reference: Any,
        state: torch.Tensor | None,
        observer: Observer,
    ) -> Pair:
        computed_once = self._reference_only or (
            not self._converted_only
            and not self.backend.rounds(step)
            and not (step.site is not None and step.site.original_args)
            and step.node not in self.program.written
            and all(first is second for first, second in inputs.values())
        )
        call = StepCall(inputs, step, self._reference, self.backend, computed_once=computed_once)
        call.state = state
        reference = self._unaliased(step, call, reference)
        if computed_once:
            value = reference
        else:
            if state is not None:
                restore_random_state(state, self.device)
            with noting_source_line(step):
                if self.program.traced.path is None:
                    result = self.backend.call(step, call.args, call.kwargs)
                else:
                    call, result = self._call_on_path(step, call, reference)
            value = self._unaliased(step, call, result)
        return reference, observer.observe(step, reference, value, call)

    def _call_on_path(self, step: Step, call: StepCall, reference: Any) -> tuple[StepCall, Any]:
        """Call a step in 16 bits, with FP32's choices where its own would change the sizes in the graph."""
        sizes = "sizes that do not fit"
        with contextlib.suppress(RuntimeError, IndexError):
            result = self.backend.call(step, call.args, call.kwargs)
            if reference is None or _shapes(reference) == _shapes(result):  # some ops return nothing
                return call, result
            sizes = shape_of(result)
        inputs = {
            node: (pair[0], pair[0]) if isinstance(pair[1], torch.Tensor) and not inexact(pair[1]) else pair
            for node, pair in call.inputs.items()
        }
        call = StepCall(inputs, step, self._reference, self.backend, computed_once=False)
        call.resized = sizes
        result = self.backend.call(step, call.args, call.kwargs)
        if _shapes(reference) == _shapes(result):
            return call, result
        # as the 16-bit run represents the reference's result
        return call, step.mapped(reference, self.backend.represent)

    def _unaliased(self, step: Step, call: StepCall, result: Any) -> Any:
        """Copy casts that are later written to, since a cast to float32 returns its own input."""
        casts = step.site is not None and step.site.role.converts
        if step.node in self.program.written and casts:
            same_dtype = node_dtype(step.node.all_input_nodes[0]) == step.dtypes[0]
            if not same_dtype and any(result is arg for arg in (*call.args, *call.ref_args)):
                return result.clone()
        return result

    def named_buffers(self) -> dict[str, Pair]:
        """Return the values that the last run left in buffers, by name."""
        return {self._places[node.name].name: pair for node, pair in self.buffers.items()}

    def placeholder(self, node: fx.Node, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Return the value of a placeholder in FP32."""
        tensor = self.weights.all.get(node.name)
        if tensor is None:
            input_nodes = [n for n in self.program.inputs if self._places[n.name].slot is Slot.INPUT]
            tensor = inputs[input_nodes.index(node)]
        return tensor.detach()

    def start(self, inputs: list[torch.Tensor], carried: CarriedState | None = None) -> GraphState:
        """Return the state before the first step, with the inputs in their dtypes."""
        values: dict[fx.Node, Pair] = {}
        carried = carried or CarriedState(inputs)
        remaining = zip(inputs, carried.inputs, strict=True)
        for node in self.program.inputs:
            place = self._places[node.name]
            buffer = carried.buffers.get(place.name)
            if place.slot is Slot.INPUT:
                wide, low = next(remaining)
                values[node] = self._input(node, wide.to(self.device), place)
                if low is not wide:
                    value = self.backend.represent(low.to(self.device), place.dtype)
                    values[node] = values[node][0], value.clone() if node in self.program.written else value
            elif node in self.program.written or buffer is not None:
                reference, value = buffer or self._weight(node, place)
                values[node] = (reference.clone(), value.clone())
        return self._state(values)

    def _state(self, values: dict[fx.Node, Pair]) -> GraphState:
        return GraphState(
            values, {n: v for n, v in values.items() if self._places[n.name].slot is Slot.BUFFER}
        )

    def _input(self, node: fx.Node, tensor: torch.Tensor, place: Placeholder) -> Pair:
        reference = self._reference.represent(tensor, place.dtype)
        value = reference
        if place.dtype in LOW_PRECISION_DTYPES:
            value = self.backend.represent(tensor, place.dtype)
        if node in self.program.written:
            return reference.clone(), value.clone()
        return reference, value

    def _value(self, node: fx.Node, values: dict[fx.Node, Pair]) -> Pair:
        pair = values.get(node)
        return pair if pair is not None else self._weight(node, self._places[node.name])

    def _weight(self, node: fx.Node, place: Placeholder) -> Pair:
        """Return a weight: masters are used directly, 16-bit copies are made for each use."""
        master = self.weights[node.name]
        # the backend also represents weights that the model itself keeps in 16 bits
        if node.name not in self.converted.copies and master.dtype not in LOW_PRECISION_DTYPES:
            stored = self._reference_weight(node)
            return stored, stored
        reference = None if self._converted_only else self._reference_weight(node)
        return reference, self.backend.represent(self.converted.unrounded(node.name, master), place.dtype)

    def _reference_weight(self, node: fx.Node) -> torch.Tensor:
        return self._reference.represent(self.weights[node.name], self._places[node.name].dtype)


class MasterWeights:
    """Holds the master weights by placeholder.

    Args:
        masters: The model's own tensors.
        device: Device of the run.
        release: Function that frees the memory of a weight until its next use.
        on_demand: Whether weights are moved to the device only for each use, or while they are held.
    """

    def __init__(
        self,
        masters: Mapping[str, torch.Tensor],
        device: torch.device,
        release: Release | None,
        *,
        on_demand: bool,
    ) -> None:
        stay = on_demand or release is not None
        self.all = {name: tensor if stay else tensor.to(device) for name, tensor in masters.items()}
        self._device = device
        self._release = release
        self._held: dict[str, torch.Tensor] = {}
        self._addresses: set[int] = set()  # data pointers of held weights, which views share

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a master on the device."""
        tensor = self._held.get(name)
        return self.all[name].detach().to(self._device) if tensor is None else tensor

    def hold(self, names: Iterable[str], pool: dict[int, torch.Tensor]) -> None:
        """Keep weights on the device until ``let_go``.

        ``pool`` holds the weights already moved for other executors, by the identity of the master.
        """
        for name in names:
            key = id(self.all[name])
            if key not in pool:
                pool[key] = self[name]
            self._held[name] = pool[key]
            self._addresses.add(pool[key].data_ptr())

    def let_go(self) -> None:
        """Free the held weights."""
        names, self._held, self._addresses = self._held, {}, set()
        if self._release is not None:
            for name in names:
                self._release(self.all[name])

    def free(self, name: str, value: object) -> None:
        """Free a weight after its last use, given its name or the view of it that was used last."""
        if self._release is None:
            return
        tensor = self.all.get(name) if value is None else value
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in self._addresses:
            self._release(tensor)


def _shapes(result: Any) -> list[Any]:
    return [getattr(leaf, "shape", None) for leaf in pytree.tree_leaves(result)]


def shape_of(result: Any) -> str:
    """Return the sizes of an op's (first) result, such as ``3x16``."""
    shape = next((leaf.shape for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)), ())
    return "x".join(map(str, shape)) or "one value"


@dataclass(slots=True)
class _Result:
    target: Any
    leaves: list[Any]
    value: Any
    uses_left: int


@dataclass(slots=True)
class SharedReference:
    """Results of the first of several runs, kept until all other runs have used them."""

    programs: Sequence[Program]  # programs of all runs, starting with the first run's
    reused: int = 0  # number of results that were not computed again
    _results: dict[SiteId, _Result] = field(default_factory=dict)
    _done: set[SiteId] = field(default_factory=set)
    _uses: dict[SiteId, int] = field(default_factory=dict)
    _leading: frozenset[SiteId] = frozenset()

    def __post_init__(self) -> None:
        first, *others = [{s.site.id for s in p.steps if s.site is not None} for p in self.programs]
        self._leading = frozenset(first)
        for sites in others:
            for site in sites & first:
                self._uses[site] = self._uses.get(site, 0) + 1

    def offer(self, step: Step, program: Program, args: Any, kwargs: Any, value: Any) -> None:
        """Keep a result of the first run."""
        if step.site is None:
            return
        self._done.add(step.site.id)
        uses = self._uses.get(step.site.id, 0)
        if uses and _shareable(step, program):
            leaves = pytree.tree_leaves((args, kwargs))
            self._results[step.site.id] = _Result(step.target, leaves, value, uses)

    def take(self, step: Step, program: Program, args: Any, kwargs: Any) -> Any:
        """Return the first run's result of the same op on the same tensors, or ``MISSING``."""
        result = self._results.get(step.site.id) if step.site is not None else None
        if result is None or step.site is None:
            return MISSING
        result.uses_left -= 1
        if result.uses_left == 0:
            del self._results[step.site.id]
        leaves = pytree.tree_leaves((args, kwargs))
        same = result.target is step.target and len(leaves) == len(result.leaves)
        if not same or not _shareable(step, program) or not all(map(_same, leaves, result.leaves)):
            return MISSING
        self.reused += 1
        return result.value

    def ready(self, group: tuple[Step, ...]) -> bool:
        """Return whether the first run has passed every shared site of a group."""
        sites = (step.site.id for step in group if step.site is not None)
        return all(site in self._done or site not in self._leading for site in sites)

    def finish(self) -> None:
        """Mark all steps of the first run as done."""
        self._done |= self._leading


class Interleaved:
    """Runs that proceed side by side, group by group, the first one ahead; several share its results."""

    def __init__(self, runs: Sequence[tuple[LockStep, GraphState, Observer]]) -> None:
        programs = [executor.program for executor, _, _ in runs]
        self._shared = SharedReference(programs) if len(runs) > 1 else None
        self._runs = [executor.proceed(state, observer, self._shared) for executor, state, observer in runs]
        self._results: list[list[Any]] = [[] for _ in runs]
        self._waiting: dict[int, tuple[Step, ...]] = {}
        for index in range(len(runs)):
            self._next(index)

    def advance(self, stops: Callable[[int], bool] = lambda index: False) -> list[list[Any]] | None:
        """Advance every run until it stops; return all results once all runs have ended.

        Args:
            stops: Whether the run with an index stops before its next group.
        """
        progressed = True
        while progressed:
            progressed = self._may_go(0, stops)
            if progressed:
                self._next(0)
            for index in range(1, len(self._runs)):
                while self._may_go(index, stops):
                    progressed = True
                    self._next(index)
        return None if self._waiting else self._results

    def _may_go(self, index: int, stops: Callable[[int], bool]) -> bool:
        if index not in self._waiting or stops(index):
            return False
        return index == 0 or self._shared is None or self._shared.ready(self._waiting[index])

    def _next(self, index: int) -> None:
        try:
            self._waiting[index] = next(self._runs[index])
        except StopIteration as end:
            self._results[index] = end.value
            self._waiting.pop(index, None)
            if index == 0 and self._shared is not None:
                self._shared.finish()


def _shareable(step: Step, program: Program) -> bool:
    """Return whether an op is deterministic, and no step writes to its result or inputs."""
    touched = (step.node, *step.node.all_input_nodes)
    return not step.mutates and not step.random and not any(node in program.written for node in touched)


def _same(first: Any, second: Any) -> bool:
    """Return whether values are equal constants or views of the same memory, which is kept alive."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first is second or (
            first.data_ptr() == second.data_ptr()
            and first.dtype == second.dtype
            and first.shape == second.shape
            and first.stride() == second.stride()
        )
    return type(first) is type(second) and bool(first == second)
