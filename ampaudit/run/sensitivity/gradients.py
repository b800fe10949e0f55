"""Measures what the rounding of each value and each gradient does to the gradients of the parameters.

For random signs v on the gradients G, the derivatives of ``v . G`` by a forward value, and by a gradient on
its way, are their effects on G; so they are probed as outputs are (see ``probe``), with a second backward
pass through FP32's backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampaudit.core.errors import RunFailed, first_line
from ampaudit.policy.scaling import StartingScale
from ampaudit.run.backward.gradients import GradientAudit, gradient_dtypes
from ampaudit.run.backward.tape import Tape
from ampaudit.run.config import RunConfig
from ampaudit.run.guards import refuse_more_than_memory
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer
from ampaudit.run.program import Program
from ampaudit.run.record import RunRecord
from ampaudit.run.sensitivity.double_backward import DoubleBackward
from ampaudit.run.sensitivity.error_tape import ErrorTape, float_nodes
from ampaudit.run.sensitivity.gradient_errors import ErrorPass, GradientErrors
from ampaudit.run.sensitivity.measure import enough_probes, most_probes, signs_like
from ampaudit.run.sensitivity.precision_graph import PrecisionGraph, values_of
from ampaudit.run.sensitivity.record import SensitivityRecord
from ampaudit.trace.graph import Slot
from ampaudit.trace.marks import mark_number
from ampaudit.trace.values import torch_dtype

__all__ = ["GradientProbe"]

LEAST = 8  # probes: a few jumps may be most of the error, and two that agree say little of them
COPIES = 10  # of the bytes of values in 16 bits: both runs', their errors, and two passes of autograd's


class GradientProbe(GradientAudit):
    """Implements ``run.config.Differentiator``: audits gradients, and probes those of the parameters.

    What a rounding before ``detach`` or ``no_grad`` does to values behind it is left out.

    Args:
        config: of the run.
        scale: the loss scale that training starts with.

    Attributes:
        graph: the values of all programs.
    """

    def __init__(self, config: RunConfig, scale: StartingScale) -> None:
        super().__init__(config, scale)
        self.graph = PrecisionGraph()
        self._found = SensitivityRecord()
        self._dtype = torch_dtype(config.number_format)
        self._seed = config.seed
        self._errors: ErrorTape | None = None

    def take(self, record: RunRecord) -> None:
        """Put what was seen since this was last called into the record of a batch."""
        super().take(record)
        record.sensitivity, self._found = self._found, SensitivityRecord()

    def pass_over(self, executor: LockStep) -> None:
        """Note the values of a batch that another machine runs."""
        self.graph.merge(values_of(executor).graph)

    def following(self, observer: Observer, program: Program) -> Observer:
        """Wrap the observer in both tapes.

        Raises:
            RunFailed: it would not fit into memory.
        """
        refuse_more_than_memory(program.traced.graph, self._device, COPIES)
        self._errors = ErrorTape(super().following(observer, program), float_nodes(program))
        return self._errors

    def run(
        self, executor: LockStep, outputs: list[Any], unrepaired: list[Any], number: int, title: str
    ) -> None:
        """Audit the gradients of the run followed last, and probe them.

        Raises:
            RunFailed: the backward pass of an op, or a custom backward, has no derivative.
        """
        tape, errors, self._errors = self._tape, self._errors, None
        assert tape is not None
        assert errors is not None
        super().run(executor, outputs, unrepaired, number, title)
        _refuse_custom_backwards(executor.program, tape)
        names = values_of(executor)
        self.graph.merge(names.graph)
        parameters = self._parameters(executor.program)
        found = self._gradient_errors(executor.program, tape, outputs[-1][0], parameters)
        self._found.measured.append(found.relative_error)
        generator = torch.Generator().manual_seed(self._seed + number)
        seeds = (_signs(found.gradients, parameters, generator) for _ in range(most_probes(errors)))
        loss = executor.program.outputs[-1]
        try:
            with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():  # fused kernels lack second derivatives
                double = DoubleBackward(errors, found, loss, self.record.scale, parameters)
                probes = enough_probes((double.probe(names, self._dtype, seed) for seed in seeds), LEAST)
        except (RuntimeError, NotImplementedError) as error:
            raise RunFailed(
                f"the gradient of an op has no gradient itself: {first_line(error)}",
                hint="leave out --sensitivity, or rank the error of the outputs without --backward",
            ) from error
        self._found.add(f"gradients of {title}", probes)

    def _parameters(self, program: Program) -> dict[fx.Node, int]:
        """Return the trainable parameters by placeholder; tied ones have several."""
        found, tensors = dict[fx.Node, int](), program.traced.tensors
        for node, place in zip(program.inputs, program.traced.placeholders, strict=True):
            if place.slot is Slot.PARAMETER and node in self._needed[id(program)]:
                found[node] = id(tensors[node.name])
        return found

    def _gradient_errors(
        self, program: Program, tape: Tape, reference: torch.Tensor, parameters: dict[fx.Node, int]
    ) -> GradientErrors:
        """Run the backward pass again, and return the errors of its ops."""
        found, loss = GradientErrors(parameters), program.outputs[-1]
        dtypes, customs = gradient_dtypes(program), self._custom[id(program)]
        seed = torch.full_like(reference, self.record.scale)
        pair = (seed, self._backend.represent(seed.clone(), dtypes[loss][0]))
        needed = self._needed[id(program)]
        ErrorPass(found, tape, needed, dtypes, self._backend, customs).run({loss: pair}, found)
        return found


def _refuse_custom_backwards(program: Program, tape: Tape) -> None:
    numbers = {mark_number(entry.step.node) for entry in tape.marks}
    names = [custom.name for custom in program.traced.custom_backwards if custom.number in numbers]
    if names:
        raise RunFailed(
            f"--sensitivity cannot rank what makes the error of gradients that {names[0]} computes",
            hint="leave out --sensitivity, or rank the error of the outputs without --backward",
        )


def _signs(
    gradients: dict[int, torch.Tensor], parameters: dict[fx.Node, int], generator: torch.Generator
) -> dict[fx.Node, torch.Tensor]:
    """Return random signs for the gradient of each parameter, the same under all names of a tied one."""
    squares = [gradient.square().sum() for gradient in gradients.values()]
    norm = torch.stack(squares).sum().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    signs = {key: signs_like(gradient.float(), generator, norm) for key, gradient in gradients.items()}
    return {node: signs[key] for node, key in parameters.items() if key in signs}
