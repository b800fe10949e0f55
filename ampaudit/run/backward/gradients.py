"""Audits the gradients of a run, and repeats the backward pass with repairs if something broke."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ampaudit.core.errors import ReferenceBroken, RunFailed
from ampaudit.policy.scaling import StartingScale
from ampaudit.run.backends import Backend, choose_backend
from ampaudit.run.backward.backward import BackwardPass
from ampaudit.run.backward.custom_backward import CustomBackwards
from ampaudit.run.backward.meter import GradientMeter
from ampaudit.run.backward.observers import GradientNames, MeasuringObserver, RepairingObserver
from ampaudit.run.backward.record import GradientRecord, UntracedBackward
from ampaudit.run.backward.tape import Tape, needs_gradient
from ampaudit.run.config import RunConfig
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer
from ampaudit.run.program import Program
from ampaudit.run.record import RunRecord
from ampaudit.trace.graph import Placeholder, Slot
from ampaudit.trace.marks import FUNCTION_OUTPUTS, TENSOR_HOOK, mark_number, marked_values

__all__ = ["GradientAudit", "gradient_dtypes"]


class GradientAudit:
    """Implements ``run.config.Differentiator``.

    Args:
        config: of the run.
        scale: the loss scale that training starts with.
    """

    def __init__(self, config: RunConfig, scale: StartingScale) -> None:
        self.record = GradientRecord(scale.value, scale.dynamic, scale.source, scale.least)
        self._backend: Backend = config.backend or choose_backend(config.device)
        self._limit = config.number_format.max
        self._needed: dict[int, frozenset[fx.Node]] = {}
        self._device = config.device
        self._custom: dict[int, CustomBackwards] = {}
        self._tape: Tape | None = None

    def take(self, record: RunRecord) -> None:
        """Put what was seen since this was last called into the record of a batch."""
        record.gradients, self.record = self.record, self.record.emptied()

    def pass_over(self, executor: LockStep) -> None:
        """Note a batch that another machine runs: nothing about gradients is known from its trace."""

    def following(self, observer: Observer, program: Program) -> Observer:
        """Wrap the observer in a tape."""
        if id(program) not in self._needed:
            self._needed[id(program)] = needs_gradient(program)
        self._tape = Tape(observer, self._needed[id(program)])
        return self._tape

    def run(
        self, executor: LockStep, outputs: list[Any], unrepaired: list[Any], number: int, title: str
    ) -> None:
        """Run the backward pass from the loss, which is the last output."""
        assert self._tape is not None, "a run is recorded before its backward pass"
        tape, program = self._tape, executor.program
        self._tape = None
        reference, value = outputs[-1]
        self._note_parameters(program)
        self.record.losses.append((float(reference), float(unrepaired[-1][1]), float(value)))
        loss, needed = program.outputs[-1], self._needed[id(program)]
        if loss not in needed:
            raise RunFailed(
                "no parameter gets a gradient: the loss depends on none that requires one",
                hint="check requires_grad of the parameters, and detach() or no_grad() before the loss",
            )
        dtypes = gradient_dtypes(program)
        if id(program) not in self._custom:
            self._custom[id(program)] = CustomBackwards(program, self._backend, self._device)
        customs = self._custom[id(program)]
        backward = BackwardPass(tape, needed, dtypes, self._backend, customs)
        seed = torch.full_like(reference, self.record.scale)
        pair = (seed, self._backend.represent(torch.full_like(seed, self.record.scale), dtypes[loss][0]))
        names = GradientNames(program.traced.site_of_node, program.traced.placeholders)

        def represent(gradient: torch.Tensor, node: fx.Node) -> torch.Tensor:
            return self._backend.represent(gradient, dtypes[node][0])

        meter = GradientMeter(self.record.scale)
        backward.run({loss: pair}, MeasuringObserver(meter, names))
        meter.finish()
        if meter.broken:
            repaired = GradientMeter(self.record.scale)
            measuring = MeasuringObserver(repaired, names)
            repairing = RepairingObserver(measuring, names, represent, self._limit, number)
            backward.run({loss: pair}, repairing)
            repaired.finish()
            self._note_origins(repairing)
            meter = repaired
        self._refuse_broken_reference(meter, title)
        meter.into(self.record)
        self._note_unpaired(meter)
        self._note_untraced(customs, names, tape)

    def _note_origins(self, repairing: RepairingObserver) -> None:
        known = {(origin.site, origin.value) for origin in self.record.origins}
        self.record.origins += [o for o in repairing.origins if (o.site, o.value) not in known]

    def _refuse_broken_reference(self, meter: GradientMeter, title: str) -> None:
        broken = meter.broken_reference
        if broken:
            raise ReferenceBroken(
                f"the FP32 gradient itself is NaN or infinite in {title}: of {broken[0]}"
                + (f" and {len(broken) - 1} more parameters" if len(broken) > 1 else "")
            )

    def _note_parameters(self, program: Program) -> None:
        places = _parameters(program)
        frozen = {p.name for p in places if not program.traced.tensors[p.node].requires_grad}
        self.record.notes += [n for n in program.traced.backward_notes if n not in self.record.notes]
        self.record.frozen = tuple(sorted(frozen | set(self.record.frozen)))
        first: dict[int, str] = {}
        for place in places:
            same = first.setdefault(id(program.traced.tensors[place.node]), place.name)
            if place.name not in frozen:
                self.record.trainable.setdefault(place.name, same)

    def _note_untraced(self, customs: CustomBackwards, names: GradientNames, tape: Tape) -> None:
        known = {(found.site, found.name) for found in self.record.untraced}
        for mark in (
            entry.step.node for entry in tape.marks if entry.step.target in (FUNCTION_OUTPUTS, TENSOR_HOOK)
        ):
            number = mark_number(mark)
            if number in customs.untraced:
                custom, (reason, instead) = customs.backwards[number], customs.untraced[number]
                site = names.op_site(mark)
                if not instead:
                    self.record.behind |= names.parameters_behind(marked_values(mark))
                if (site, custom.name) not in known:
                    self.record.untraced.append(
                        UntracedBackward(site, custom.name, reason, custom.source, instead)
                    )

    def _note_unpaired(self, meter: GradientMeter) -> None:
        for site in meter.unpaired:
            note = f"{site}: its gradient is not audited; its size depends on values and differs in 16 bits"
            if note not in self.record.notes:
                self.record.notes.append(note)


def _parameters(program: Program) -> list[Placeholder]:
    return [p for p in program.traced.placeholders if p.slot is Slot.PARAMETER]


def gradient_dtypes(program: Program) -> dict[fx.Node, tuple[torch.dtype | None, ...]]:
    """Return the dtypes of each node's values in the converted model, which its gradients have, too."""
    places = {p.node: p.dtype for p in program.traced.placeholders}
    found: dict[fx.Node, tuple[torch.dtype | None, ...]] = {n: (places[n.name],) for n in program.inputs}
    found.update({step.node: step.dtypes for step in program.steps})
    return found
