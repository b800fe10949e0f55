"""The configuration of a run: a policy, a format, a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, RuleSet
from ampaudit.run.against.comparison import ModelComparison
from ampaudit.run.backends import Backend
from ampaudit.run.lockstep import LockStep, Observer, Pair
from ampaudit.run.program import Program
from ampaudit.run.record import RunRecord
from ampaudit.trace.converted import Release
from ampaudit.trace.op_calls import Edit

__all__ = ["Against", "Differentiator", "KeepOutputs", "NextInputs", "RunConfig", "Steps"]

KeepOutputs = Callable[[int, dict[str, Pair]], None]
NextInputs = Callable[[Any, Any], Any]


class Differentiator(Protocol):
    """Follows a run and then runs its backward pass."""

    def take(self, record: RunRecord) -> None:
        """Put what it has seen since this was last called into the record of a batch."""

    def pass_over(self, executor: LockStep) -> None:
        """Note a batch that is traced here, and run by another machine."""

    def following(self, observer: Observer, program: Program) -> Observer:
        """Wrap an observer so that the values needed by the backward pass are kept."""

    def run(
        self, executor: LockStep, outputs: list[Pair], unrepaired: list[Pair], number: int, title: str
    ) -> None:
        """Run the backward pass of the run followed last; the last output is the loss.

        ``unrepaired`` are the outputs of the run before, in which no fault was repaired.
        """


class Against(Protocol):
    """A reference model that runs beside the audited one."""

    def compare(self, executor: LockStep, own: list[torch.Tensor], number: int) -> ModelComparison:
        """Run the reference on the batch of that number, and compare the audited model with it."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The number of steps of each batch, the function that makes the next inputs, and what that is."""

    count: int
    next_inputs: NextInputs
    fed_back: str = ""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of a run.

    Attributes:
        rules: the policy, ``None`` for the FP32 run alone (``--ranges``).
        author_rules: the meaning of autocast regions in the model's code.
        number_format: the 16-bit format.
        device: where to run.
        seed: of every random number drawn during the run.
        backend: overrides the device's usual backend.
        measured: what an earlier run saw, for the policy's second phase.
        reference_only: run FP32 alone, on the graph that the policy makes.
        edits: ops to rewrite, by site, to try a change of the model's code.
        keep_graphs: whether each graph is kept, even without new sites: proofs are about all graphs.
        keep_outputs: told the outputs of each batch; of a second phase, again.
        release: gives the memory of a weight back until it is needed again.
        differentiator: makes what audits the gradients of a run; the model's last output is then the loss.
        min_sqnr: accuracy in dB below which it is found out where an output's error enters; ``None`` for
            runs of which only the verdict counts.
        steps: what is done with each batch; calls are then numbered over all steps of all batches.
        against: the model whose outputs are right, if it is another one.
        probing: whether the differentiator probes outputs instead of a loss.
        memory: bytes that weights and values may take, for a run of all batches through one segment of the
            program at a time; ``None`` for a run of one batch after the other.
    """

    rules: RuleSet | None
    author_rules: RuleSet
    number_format: NumberFormat
    device: torch.device
    seed: int = 0
    backend: Backend | None = None
    measured: Mapping[SiteId, Measurement] = field(default_factory=dict)
    reference_only: bool = False
    edits: Mapping[SiteId, Edit] = field(default_factory=dict)
    keep_graphs: bool = False
    keep_outputs: KeepOutputs | None = None
    release: Release | None = None
    differentiator: Callable[[RunConfig], Differentiator] | None = None
    min_sqnr: float | None = None
    steps: Steps | None = None
    against: Against | None = None
    probing: bool = False
    memory: int | None = None

    @property
    def trains(self) -> bool:
        """Whether the gradients of a loss are asked for."""
        return self.differentiator is not None and not self.probing

    def call_name(self, number: int) -> str:
        """Name a call: its batch, or its step and, after the first batch, both."""
        if self.steps is None:
            return f"batch {number}"
        batch, step = divmod(number, self.steps.count)
        return f"step {step + 1}" + (f" of batch {batch}" if batch else "")

    @property
    def fp32_only(self) -> bool:
        """Whether nothing runs in 16 bits."""
        return self.rules is None or self.reference_only
