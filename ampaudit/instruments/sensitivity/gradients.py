"""Measures the effect of rounding each value and each gradient on the gradients of the parameters.

For random signs v on the gradients G, the derivatives of ``v . G`` with respect to forward values and
intermediate gradients are their effects on G. So they are probed like outputs (see ``probe``), with a second
backward pass through FP32's backward pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampaudit.core.errors import RunFailed, first_line
from ampaudit.core.ops import having
from ampaudit.core.text import short_op
from ampaudit.instruments.backward.audit import GradientAudit, gradient_dtypes
from ampaudit.instruments.backward.passes import BackwardPass, FaultSource, GradientObserver, GradientPair
from ampaudit.instruments.backward.vjp import Tape, TapeEntry, vjp
from ampaudit.instruments.sensitivity import INSTRUMENT
from ampaudit.instruments.sensitivity.outputs import enough_probes, max_probes, signs_like
from ampaudit.instruments.sensitivity.probe import (
    BackwardKind,
    Collected,
    DifferentiableBackend,
    ErrorCollector,
    ErrorTape,
    PrecisionGraph,
    SensitivityPart,
    ValueNames,
    error_where_finite,
    float_nodes,
    values_of,
)
from ampaudit.run.backends import Float32Backend, rounded
from ampaudit.run.config import RunConfig
from ampaudit.run.device import refuse_more_than_memory, restore_random_state
from ampaudit.run.lockstep import LockStep, Observer, resolved
from ampaudit.run.program import Program, Step, passes_gradients
from ampaudit.run.record import RunRecord
from ampaudit.trace.flatten import is_mark, mark_number
from ampaudit.trace.functional import DETACH_OPS
from ampaudit.trace.graph import Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES, components, torch_dtype, widened_tensor, widened_value

MIN_PROBES = 8  # a few jumps may be most of the error, and two probes that agree may miss them
COPIES = 10  # of the bytes of values in 16 bits: both runs', their errors, and two passes of autograd


class GradientProbe(GradientAudit):
    """Audits gradients, and probes those of the parameters.

    The effect of rounding before ``detach`` or ``no_grad`` on values behind it is not included.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.graph = PrecisionGraph()  # values of all programs
        self._sensitivity = SensitivityPart()
        self._dtype = torch_dtype(config.number_format)
        self._seed = config.seed
        self._errors: ErrorTape | None = None

    def take(self, record: RunRecord) -> None:
        """Move the results since the last call into the record of a batch."""
        super().take(record)
        record.parts[INSTRUMENT.name], self._sensitivity = self._sensitivity, SensitivityPart()

    def skip(self, executor: LockStep) -> None:
        """Register the values of a batch that another machine runs."""
        self.graph.merge(values_of(executor).graph)

    def following(self, observer: Observer, program: Program) -> Observer:
        """Wrap the observer in both tapes, if they fit into memory."""
        refuse_more_than_memory(program.traced.graph, self._device, COPIES)
        self._errors = ErrorTape(super().following(observer, program), float_nodes(program))
        return self._errors

    def finish(
        self, executor: LockStep, outputs: list[Any], unrepaired: list[Any], number: int, title: str
    ) -> None:
        """Audit the gradients of the run followed last, and probe them.

        Raises:
            RunFailed: The backward pass of an op, or a custom backward, has no derivative.
        """
        tape, errors, self._errors = self._tape, self._errors, None
        assert tape is not None
        assert errors is not None
        super().finish(executor, outputs, unrepaired, number, title)
        numbers = {mark_number(entry.step.node) for entry in tape.marks}
        customs = [c.name for c in executor.program.traced.custom_backwards if c.number in numbers]
        if customs:
            raise RunFailed(
                f"--sensitivity cannot rank what makes the error of gradients that {customs[0]} computes",
                hint="leave out --sensitivity, or rank the error of the outputs without --backward",
            )
        names = values_of(executor)
        self.graph.merge(names.graph)
        parameters = self._parameters(executor.program, tape)
        backward_errors = GradientErrors(parameters)
        program = executor.program
        dtypes, custom = gradient_dtypes(program), self._custom[id(program)]
        backward = ErrorPass(tape, dtypes, self._backend, custom, errors=backward_errors)
        backward.run(self.seeds(program, outputs[-1][0]), backward_errors)
        self._sensitivity.measured.append(backward_errors.relative_error)
        generator = torch.Generator().manual_seed(self._seed + number)
        signs = (_signs(backward_errors.gradients, parameters, generator) for _ in range(max_probes(errors)))
        loss = program.outputs[-1]
        try:
            with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():  # fused kernels lack second derivatives
                double = DoubleBackward(errors, backward_errors, loss, self.record.scale)
                probes = enough_probes((double.probe(names, self._dtype, seed) for seed in signs), MIN_PROBES)
        except (RuntimeError, NotImplementedError) as error:
            raise RunFailed(
                f"the gradient of an op has no gradient itself: {first_line(error)}",
                hint="leave out --sensitivity, or rank the error of the outputs without --backward",
            ) from error
        self._sensitivity.add(f"gradients of {title}", probes)

    def _parameters(self, program: Program, tape: Tape) -> dict[fx.Node, int]:
        """Map placeholders to the identities of trainable parameters; tied ones have several."""
        parameters, tensors = dict[fx.Node, int](), program.traced.tensors
        for node, place in zip(program.inputs, program.traced.placeholders, strict=True):
            if place.slot is Slot.PARAMETER and node in tape.needed:
                parameters[node] = id(tensors[node.name])
        return parameters


def _signs(
    gradients: dict[int, torch.Tensor], parameters: dict[fx.Node, int], generator: torch.Generator
) -> dict[fx.Node, torch.Tensor]:
    """Return random signs for the gradient of each parameter, the same under all names of a tied one."""
    squares = [gradient.square().sum() for gradient in gradients.values()]
    norm = torch.stack(squares).sum().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    signs = {key: signs_like(gradient.float(), generator, norm) for key, gradient in gradients.items()}
    return {node: signs[key] for node, key in parameters.items() if key in signs}


class _ErrorTerm(NamedTuple):
    """A value whose gradient has an error (or that gradient), the op that computes it, and the kind."""

    op: fx.Node
    kind: BackwardKind
    tensor: torch.Tensor
    error: torch.Tensor


class DoubleBackward:
    """FP32's forward and backward pass as one autograd graph, with the gradients that have errors."""

    def __init__(self, tape: ErrorTape, errors: GradientErrors, loss: fx.Node, scale: float) -> None:
        self._tape = tape
        self._backend = DifferentiableBackend()
        self._values: dict[fx.Node, Any] = {}
        self._reads: dict[tuple[fx.Node, fx.Node], torch.Tensor] = {}
        for entry in tape.steps:
            if not is_mark(entry.step.target):
                self._forward(entry)
        reads, values = self._reads, self._values
        sums = {node: e for node, e in errors.sums.items() if _has_gradient(values.get(node))}
        terms: list[_ErrorTerm] = [
            *(_ErrorTerm(k[0], "gradient", reads[k], e) for k, e in errors.shares.items() if k in reads),
            *(_ErrorTerm(k[0], "jump", reads[k], e) for k, e in errors.jumps.items() if k in reads),
            *(_ErrorTerm(node, "gradient", values[node], e) for node, e in sums.items()),
        ]
        ends = [node for node in errors.parameters if node in values]
        targets = [*(term.tensor for term in terms), *(values[node] for node in ends)]
        # autograd returns the tensors with which it continues, so that they can be differentiated by
        gradients = torch.autograd.grad(values[loss] * scale, targets, create_graph=True, allow_unused=True)
        passing = [gradient if _has_gradient(gradient) else None for gradient in gradients]
        self._terms = [
            term._replace(tensor=gradient)
            for term, gradient in zip(terms, passing[: len(terms)], strict=True)
            if gradient is not None
        ]
        pairs = zip(ends, passing[len(terms) :], strict=True)
        self._gradients = {node: gradient for node, gradient in pairs if gradient is not None}

    def _forward(self, entry: TapeEntry) -> None:
        step = entry.step
        inputs: dict[fx.Node, Any] = {}
        for node, (reference, _) in entry.inputs.items():
            if node not in self._values:
                self._values[node] = _leaf(reference)
            value = self._values[node]
            if _has_gradient(value):  # each reader gets its own view, to separate the effects of rounding
                self._reads[step.node, node] = value = value.view_as(value)
            inputs[node] = value, None
        passes = passes_gradients(step.node) and str(step.target) not in DETACH_OPS
        args, kwargs = resolved(self._backend.arguments(step), inputs, 0)
        if kwargs.get("sparse"):
            kwargs = kwargs | {"sparse": False}
        if entry.state is not None:
            devices = (value.device for value, _ in inputs.values() if isinstance(value, torch.Tensor))
            restore_random_state(entry.state, next(devices, torch.device("cpu")))
        with torch.set_grad_enabled(passes):
            result = self._backend.call_differentiably(step, args, kwargs)
        self._values[step.node] = result if passes else _leaf(result)

    def probe(self, names: ValueNames, dtype: torch.dtype, seed: Mapping[fx.Node, torch.Tensor]) -> Collected:
        """Return what each rounding adds to the error of the gradients, given random signs on them."""
        gradients = self._gradients
        if not gradients:
            return Collected({}, {}, {})
        total = torch.stack([(components(gradients[node]) * seed[node]).sum() for node in gradients]).sum()
        collector = ErrorCollector(names, self._tape, dtype)
        values = {node: value for node, value in self._values.items() if _has_gradient(value)}
        targets = [*values.values(), *self._reads.values(), *(term.tensor for term in self._terms)]
        effects = iter(torch.autograd.grad(total, targets, retain_graph=True, allow_unused=True))
        for node in values:
            if (effect := next(effects)) is not None:
                collector.observe_total(node, None, (effect, effect))
        steps = {entry.step.node: entry.step for entry in self._tape.steps}
        for reader, of in self._reads:
            if (effect := next(effects)) is not None:
                collector.observe_share(steps[reader], of, (effect, effect))
        for term in self._terms:
            if (effect := next(effects)) is not None:
                collector.add_backward(term.op, term.kind, effect, term.error)
        return collector.fetched()


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaf(value: Any) -> Any:
    """Return floating-point values as leaves."""
    if isinstance(value, torch.Tensor):
        floats = value.is_floating_point() or value.is_complex()
        return value.detach().requires_grad_() if floats else value
    return type(value)(map(_leaf, value)) if isinstance(value, list | tuple) else value


class GradientErrors(GradientObserver):
    """The errors that rounding adds in a backward pass.

    ``parameters`` holds the identities of trainable parameters by placeholder; tied ones have several.
    """

    def __init__(self, parameters: Mapping[fx.Node, int]) -> None:
        self.parameters = parameters
        # difference of an op's gradients in 16 bits and in FP32 from the same values, by op and input
        self.shares: dict[tuple[fx.Node, fx.Node], torch.Tensor] = {}
        self.sums: dict[fx.Node, torch.Tensor] = {}  # the same for adding up several shares, by node
        # change of a gradient by values that cross an edge in 16 bits, by op and input
        self.jumps: dict[tuple[fx.Node, fx.Node], torch.Tensor] = {}
        self._arrived: dict[fx.Node, int] = defaultdict(int)
        self._complete: dict[int, list[GradientPair]] = defaultdict(list)

    def observe_share(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Count the shares of a sum."""
        self._arrived[of] += 1
        return pair[1]

    def observe_total(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Record the error of a sum, and the gradient of a parameter."""
        additions = self._arrived[node] - 1
        if additions > 0 and dtype in LOW_PRECISION_DTYPES:
            error = error_where_finite(rounded(pair[0], dtype), widened_tensor(pair[0]))
            self.sums[node] = error * math.sqrt(additions)
        if node in self.parameters:
            self._complete[self.parameters[node]].append((components(pair[0]), components(pair[1])))
        return pair[1]

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """FP32's gradients of the parameters, as real components."""
        return {key: _total(pairs, 0) for key, pairs in self._complete.items()}

    @property
    def relative_error(self) -> float:
        """The squared error of all parameters' gradients relative to their squares; inf if broken."""
        pairs = ((wide, _total(self._complete[key], 1)) for key, wide in self.gradients.items())
        squares = [torch.stack([(wide - low).square().sum(), wide.square().sum()]) for wide, low in pairs]
        error, size = torch.stack(squares).sum(0).tolist() if squares else (0.0, 0.0)
        broken = not math.isfinite(error)
        return math.inf if broken else error / size if size else 0.0


def _total(pairs: list[GradientPair], side: int) -> torch.Tensor:
    first, *others = (widened_tensor(pair[side]) for pair in pairs)
    return sum(others, first.double())


@dataclass
class ErrorPass(BackwardPass):
    """A backward pass that records the error that each op's backward adds."""

    errors: GradientErrors = field(kw_only=True)

    def _products(
        self, entry: TapeEntry, out: list[GradientPair | None]
    ) -> Iterator[tuple[fx.Node, GradientPair]]:
        products = dict(super()._products(entry, out))
        low = [node for node in products if self.dtypes[node][0] in LOW_PRECISION_DTYPES]
        for node, exact in self._exact(entry, low, [None if pair is None else pair[1] for pair in out]):
            self.errors.shares[entry.step.node, node] = error_where_finite(products[node][1], exact)
        if entry.step.site is not None and short_op(entry.step.site.op) in having("piecewise"):
            wide = [None if pair is None else pair[0] for pair in out]
            for node, exact in self._exact(entry, products, wide):
                self.errors.jumps[entry.step.node, node] = error_where_finite(exact, products[node][0])
        yield from products.items()

    def _exact(
        self, entry: TapeEntry, nodes: Collection[fx.Node], gradients: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        """Yield the gradients that FP32 computes from the 16-bit run's values."""
        if not nodes:
            return
        inputs = {node: (widened_value(pair[1]),) * 2 for node, pair in entry.inputs.items()}
        same = TapeEntry(entry.step, inputs, True, entry.state)
        wide = [None if gradient is None else widened_tensor(gradient) for gradient in gradients]
        for node, exact in zip(nodes, vjp(same, 0, Float32Backend(), list(nodes), wide), strict=True):
            if exact is not None:
                yield node, widened_tensor(exact)
