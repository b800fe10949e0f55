"""Runs the backward pass of a recorded run op by op, in FP32 and 16 bits side by side."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ampaudit.core.errors import first_line
from ampaudit.core.sites import SourceLine
from ampaudit.instruments.backward.vjp import Tape, TapeEntry, vjp
from ampaudit.run.backends import Backend, Float32Backend
from ampaudit.run.lockstep import LockStep, Observer, Pair, StepCall
from ampaudit.run.measure import wrong_elements
from ampaudit.run.program import Program, Step, compile_program
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.flatten import (
    FUNCTION_INPUTS,
    FUNCTION_OUTPUTS,
    TENSOR_HOOK,
    is_mark,
    mark_number,
    marked_values,
    saved_values,
)
from ampaudit.trace.graph import CustomBackward, FunctionCall, Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES

GradientPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class FaultSource:
    """The origin of a wrong gradient in a custom backward: its name, the op, and the line."""

    name: str
    op: str
    source: SourceLine | None


@dataclass(frozen=True, slots=True)
class GradientShare:
    """A contribution of a custom backward to a node's gradient."""

    node: fx.Node
    pair: GradientPair
    fault: FaultSource


class CustomBackwards:
    """All custom backwards of a program."""

    def __init__(self, program: Program, backend: Backend, device: torch.device) -> None:
        self.backend = backend
        self.backwards = {custom.number: custom for custom in program.traced.custom_backwards}
        # for each that does not run as steps, the reason and what happens instead
        self.untraced: dict[int, tuple[str, str]] = {}
        self.executors = {
            number: LockStep(
                compile_program(custom.traced, device), attach_weights(custom.traced), backend, device
            )
            for number, custom in self.backwards.items()
            if custom.traced is not None
        }


class CustomBackwardRun:
    """Runs the custom backwards along one tape as gradients arrive."""

    def __init__(self, backwards: CustomBackwards, tape: Tape) -> None:
        self._all = backwards
        self._shared: dict[str, Pair] = {}  # computed by one backward and read by another
        self._marks: dict[tuple[Any, int], TapeEntry] = {}
        # hooks of each node's gradient, in order: the step that marks it, and its number
        self.hooks: defaultdict[fx.Node, list[tuple[Step, int]]] = defaultdict(list)
        for entry in tape.marks:
            node = entry.step.node
            self._marks[node.target, mark_number(node)] = entry
            if node.target is TENSOR_HOOK:
                self.hooks[marked_values(node)[0]].append((entry.step, mark_number(node)))

    def run(self, number: int, gradients: Sequence[GradientPair | None]) -> list[GradientShare]:
        """Compute the gradients of a function's inputs and leaves from those of its outputs.

        The single input of a hook is the value whose gradient it receives.
        """
        custom = self._all.backwards.get(number)
        if custom is None:
            return []
        entered = self._marks.get((FUNCTION_INPUTS, number)) or self._marks[TENSOR_HOOK, number]
        if custom.traced is None:
            return self._as_whole(custom, entered, gradients)
        saved = self._marks[saved_values, number]
        values, observer = marked_values(saved.step.node), _FirstFault()
        pairs: list[Pair] = []
        for kind, key in custom.inputs:
            if kind == "gradient":
                pairs.append(self._gradient(entered, number, int(key), gradients))
            elif kind == "shared":
                pairs.append(self._shared[str(key)])
            else:
                pairs.append(saved.inputs[values[int(key)]])
        executor = self._all.executors[number]
        outputs = executor.run_pairs(pairs, observer)
        first = len(outputs) - len(custom.shares)
        self._shared.update(zip(custom.shares, outputs[first:], strict=True))
        nodes = [*marked_values(entered.step.node), *(values[place] for place in custom.leaves)]
        numbers = [*custom.returns, *range(first - len(custom.leaves), first)]
        output_nodes = executor.program.outputs
        return [
            GradientShare(node, outputs[index], observer.fault(custom, output_nodes[index]))
            for node, index in zip(nodes, numbers, strict=True)
            if index is not None
        ]

    def _gradient(
        self, entered: TapeEntry, number: int, index: int, gradients: Sequence[GradientPair | None]
    ) -> Pair:
        """Return an accumulated gradient, or zeros, in the memory format of its value."""
        mark = self._marks.get((FUNCTION_OUTPUTS, number)) or entered
        like, pair = mark.inputs[marked_values(mark.step.node)[index]], gradients[index]
        if pair is None:
            zeros = torch.zeros_like(like[0])
            return zeros, zeros if like[0] is like[1] else torch.zeros_like(like[1])
        first = _laid_out(pair[0], like[0])
        return first, first if pair[0] is pair[1] else _laid_out(pair[1], like[1])

    def _as_whole(
        self, custom: CustomBackward, entered: TapeEntry, gradients: Sequence[GradientPair | None]
    ) -> list[GradientShare]:
        """Call a function that could not be traced as a whole, if possible."""
        reason = custom.failure or ""
        self._all.untraced[custom.number] = (reason, "left out" if entered.step.target is TENSOR_HOOK else "")
        if custom.call is None:
            return []
        nodes, fault = marked_values(entered.step.node), FaultSource(custom.name, "", custom.source)
        values = [entered.inputs[node] for node in nodes]
        try:
            first = _call_whole(custom.call, [v[0] for v in values], [g and g[0] for g in gradients])
            dtypes = [node.meta["val"].dtype for node in nodes]
            low_precision = [
                v[1].to(d) if v[1].is_floating_point() else v[1] for v, d in zip(values, dtypes, strict=True)
            ]
            second = _call_whole(custom.call, low_precision, [g and g[1] for g in gradients])
        except Exception as error:  # whatever the author's code or a kernel raises
            self._all.untraced[custom.number] = (f"{reason}; run as a whole: {first_line(error)}", "")
            return []
        self._all.untraced[custom.number] = (reason, "as a whole")
        return [
            GradientShare(node, (a, self._all.backend.represent(b, dtype)), fault)
            for node, dtype, a, b in zip(nodes, dtypes, first, second, strict=True)
            if a is not None and b is not None
        ]


def _call_whole(
    call: FunctionCall, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Compute the input gradients from the output gradients, on kernels of the tensors' own dtypes.

    ``gradients`` are those of the differentiable outputs, ``None`` where there is none.
    """
    leaves = [v.detach().clone().requires_grad_(v.is_floating_point() or v.is_complex()) for v in values]
    args: list[Any] = list(call.args)
    for place, leaf in zip(call.tensors, leaves, strict=True):
        args[place] = leaf
    with torch.enable_grad():
        result: Any = call.function.apply(*args)
    outputs = result if isinstance(result, tuple | list) else (result,)
    pairs = [
        (outputs[place], gradient.to(outputs[place].dtype))
        for place, gradient in zip(call.outputs, gradients, strict=True)
        if gradient is not None
    ]
    sources = [leaf for leaf in leaves if leaf.requires_grad]
    input_gradients = iter(
        torch.autograd.grad([o for o, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
    )
    return [next(input_gradients) if leaf.requires_grad else None for leaf in leaves]


class _FirstFault(Observer):
    """Records the first step with inf or NaN in 16 bits only."""

    def __init__(self) -> None:
        self._first: Site | None = None
        self._sites: dict[fx.Node, Site] = {}

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        if step.site is not None:
            before = self._sites.get(step.node.all_input_nodes[0]) if step.node.all_input_nodes else None
            # ops that autograd inserts have no line: use that of the op before
            self._sites[step.node] = step.site if step.site.source is not None else before or step.site
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            if self._first is None and floats and wrong_elements(reference, value) is not None:
                self._first = self._sites[step.node]
        return value

    def fault(self, custom: CustomBackward, node: fx.Node) -> FaultSource:
        """Return the first fault, or else the op that computed the gradient."""
        site = self._first or self._sites.get(node)
        if site is None:
            return FaultSource(custom.name, "", custom.source)
        return FaultSource(custom.name, site.op, site.source or custom.source)


def _laid_out(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the strides of its value, since autograd may pass views or expanded tensors."""
    like = torch.empty_like(value, dtype=gradient.dtype)
    return gradient if gradient.stride() == like.stride() else like.copy_(gradient)


class GradientObserver:
    """Observes gradients as they are computed; the 16-bit run continues with the returned value."""

    def observe_share(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Observe one op's share of the gradient of ``of``; ``fault`` is the op inside a custom backward."""
        return pair[1]

    def observe_sum(self, node: fx.Node, pair: GradientPair) -> torch.Tensor:
        """Observe the sum of all shares of a node's gradient before its hooks run."""
        return pair[1]

    def observe_total(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Observe the gradient of a node's value after its hooks have run."""
        return pair[1]


@dataclass(slots=True)
class Gradients:
    """Accumulated gradients by node and output number; ``backend`` is that of the 16-bit run."""

    backend: Backend
    pairs: dict[fx.Node, dict[int, GradientPair]]

    def take(self, node: fx.Node, count: int) -> list[GradientPair | None]:
        """Return the accumulated gradients of a node's outputs."""
        arrived = self.pairs.pop(node, {})
        return [arrived.get(index) for index in range(count)]

    def add(self, node: fx.Node, index: int, pair: GradientPair, rounding: torch.dtype | None) -> None:
        """Add a share; the sum is rounded to the format."""
        arrived = self.pairs.setdefault(node, {})
        if index not in arrived:
            arrived[index] = pair
            return
        before = arrived[index]
        reference = before[0] + pair[0]
        same = before[0] is before[1] and pair[0] is pair[1]
        value = reference if same else self.backend.represent(before[1] + pair[1], rounding)
        arrived[index] = (reference, value)


@dataclass
class BackwardPass:
    """The backward pass through one tape."""

    tape: Tape  # tape of the run
    # dtypes of each node's outputs in the converted model
    dtypes: dict[fx.Node, tuple[torch.dtype | None, ...]]
    backend: Backend  # backend of the 16-bit run
    customs: CustomBackwards  # custom backwards along the tape
    reference: Backend = field(default_factory=Float32Backend)  # backend of FP32's run

    def run(self, seeds: Mapping[fx.Node, GradientPair], observer: GradientObserver) -> None:
        """Run from outputs with known gradients (a loss: the loss scale) to the parameters."""
        self._observer = observer
        self._gradients = Gradients(self.backend, {node: {0: seed} for node, seed in seeds.items()})
        self._custom = CustomBackwardRun(self.customs, self.tape)
        for entry in reversed(self.tape.steps):
            self._step(entry)
        for node in list(self._gradients.pairs):
            self._complete(node, self._gradients.take(node, 1))

    def _step(self, entry: TapeEntry) -> None:
        node = entry.step.node
        if is_mark(entry.step.target):
            if entry.step.target is FUNCTION_OUTPUTS:
                self._through_function(entry)
            return
        arrived = self._gradients.take(node, len(entry.step.dtypes))
        if not any(arrived):
            return
        if entry.step.target is operator.getitem:
            source, index = node.args
            pair = arrived[0]
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            assert pair is not None
            pair = self._completed(node, entry.step.dtypes[0], pair)
            self._gradients.add(source, index, pair, entry.step.dtypes[0])
            return
        out = self._complete(node, arrived)
        for used, share in self._products(entry, out):
            pair = (share[0], self._observer.observe_share(entry.step, used, share))
            self._gradients.add(used, 0, pair, self.dtypes[used][0])

    def _complete(self, node: fx.Node, arrived: list[GradientPair | None]) -> list[GradientPair | None]:
        if len(arrived) > 1:  # each was observed at its getitem
            return arrived
        return [
            None if pair is None else self._completed(node, dtype, pair)
            for pair, dtype in zip(arrived, self.dtypes[node], strict=True)
        ]

    def _completed(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> GradientPair:
        pair = (pair[0], self._observer.observe_sum(node, pair))
        for step, number in self._custom.hooks.get(node, ()):
            for share in self._custom.run(number, [pair]):
                stored = self._as_stored(share)
                pair = (stored[0], self._observer.observe_share(step, node, stored, share.fault))
        return pair[0], self._observer.observe_total(node, dtype, pair)

    def _through_function(self, entry: TapeEntry) -> None:
        """Compute the gradients of a custom function's inputs with its own backward."""
        out = [
            self._complete(node, self._gradients.take(node, 1))[0] for node in marked_values(entry.step.node)
        ]
        if not any(out):
            return
        for share in self._custom.run(mark_number(entry.step.node), out):
            if share.node in self.tape.needed:
                stored = self._as_stored(share)
                pair = (stored[0], self._observer.observe_share(entry.step, share.node, stored, share.fault))
                self._gradients.add(share.node, 0, pair, self.dtypes[share.node][0])

    def _as_stored(self, share: GradientShare) -> GradientPair:
        """Cast a gradient to the dtype of its value, as autograd does."""
        dtype = self.dtypes[share.node][0]
        first = self.reference.represent(share.pair[0], dtype)
        return first, self.backend.represent(share.pair[1], dtype)

    def _products(
        self, entry: TapeEntry, out: list[GradientPair | None]
    ) -> Iterator[tuple[fx.Node, GradientPair]]:
        nodes = [
            node
            for node in dict.fromkeys(entry.step.node.all_input_nodes)
            if node in self.tape.needed and isinstance(entry.inputs[node][0], torch.Tensor)
        ]
        if not nodes:
            return
        first = [None if pair is None else pair[0] for pair in out]
        second = [None if pair is None else pair[1] for pair in out]
        references = vjp(entry, 0, self.reference, nodes, first)
        same = entry.computed_once and all(a is b for a, b in zip(first, second, strict=True))
        if same and not any(self.dtypes[node][0] in LOW_PRECISION_DTYPES for node in nodes):
            values = references
        else:
            values = vjp(entry, 1, self.backend, nodes, second)
        for node, reference, value in zip(nodes, references, values, strict=True):
            if reference is None or value is None:
                continue
            if value is not reference:
                # results of formulas and of autograd may share the reference's memory
                sources = (*second, *first, reference, *values[: nodes.index(node)])
                value = self.backend.represented_result(value, self.dtypes[node][0], sources)
            yield node, (reference, value)
