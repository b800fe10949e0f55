"""Runs custom backwards of autograd functions and hooks in FP32 and 16 bits in lock-step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ampaudit.core.errors import first_line
from ampaudit.core.sites import SourceLine
from ampaudit.run.backends import Backend, Float32Backend
from ampaudit.run.backward.tape import Tape, TapeEntry
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer, Pair, StepCall
from ampaudit.run.program import Program, compile_program
from ampaudit.run.step import Step
from ampaudit.run.views import wrong_elements
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.flatten import (
    FUNCTION_INPUTS,
    FUNCTION_OUTPUTS,
    TENSOR_HOOK,
    mark_number,
    marked_values,
    saved_values,
)
from ampaudit.trace.graph import CustomBackward, FunctionCall, Site

__all__ = ["CustomBackwardRun", "CustomBackwards", "FaultSource", "GradientPair", "GradientShare"]

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
    """All custom backwards of a program.

    Attributes:
        untraced: For each that does not run as steps, the reason and what happens instead.
    """

    def __init__(self, program: Program, backend: Backend, device: torch.device) -> None:
        self.backend = backend
        self.reference = Float32Backend()
        self.backwards = {custom.number: custom for custom in program.traced.custom_backwards}
        self.untraced: dict[int, tuple[str, str]] = {}
        self.executors = {
            number: LockStep(
                compile_program(custom.traced, device), attach_weights(custom.traced), backend, device
            )
            for number, custom in self.backwards.items()
            if custom.traced is not None
        }


class CustomBackwardRun:
    """Runs the custom backwards along one tape as gradients arrive.

    Attributes:
        hooks: Hooks of each node's gradient, in order: the step that marks it, and its number.
    """

    def __init__(self, backwards: CustomBackwards, tape: Tape) -> None:
        self._all = backwards
        self._shared: dict[str, Pair] = {}  # computed by one backward and read by another
        self._marks: dict[tuple[Any, int], TapeEntry] = {}
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
    leaves = [v.detach().clone().requires_grad_(v.is_floating_point()) for v in values]
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
        """Observe one result."""
        del call
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
