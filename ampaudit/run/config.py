"""Defines the configuration of a run: a policy, a format, a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, RuleSet
from ampaudit.policy.load import StartingScale
from ampaudit.run.backends import Backend
from ampaudit.run.comparison import ModelComparison
from ampaudit.run.lockstep import LockStep, Observer, Pair
from ampaudit.run.program import Program
from ampaudit.run.record import RunRecord
from ampaudit.trace import TraceConfig
from ampaudit.trace.converted import Release
from ampaudit.trace.op_calls import Edit
from ampaudit.trace.path.recorder import PathTracing

KeepOutputs = Callable[[int, dict[str, Pair]], None]
NextInputs = Callable[[Any, Any], Any]
# runs a reference model on the inputs of a numbered batch, and compares it with the audited model
Against = Callable[[LockStep, list[torch.Tensor], int], ModelComparison]


class Recorder:
    """Watches the runs of every batch; the base class records nothing."""

    def following(self, observer: Observer, program: Program) -> Observer:
        """Return the observer of the next run: the usual one, or one that wraps it.

        A call that breaks is run twice, the second time with repairs.
        """
        return observer

    def finish(
        self, executor: LockStep, outputs: list[Pair], unrepaired: list[Pair], number: int, title: str
    ) -> None:
        """Evaluate a call after its last run: a batch, or a step of one.

        Args:
            executor: Executor of the run.
            outputs: Outputs of the last run.
            unrepaired: Outputs of the run without repairs.
            number: Number of the call.
            title: Name of the call in messages.
        """

    def skip(self, executor: LockStep) -> None:
        """Note a batch that is only traced here, since another process runs it."""

    def take(self, record: RunRecord) -> None:
        """Move what was recorded since the last call into the record of a batch."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The number of steps of each batch, the function that makes the next inputs, and its description."""

    count: int
    next_inputs: NextInputs
    fed_back: str = ""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of a run."""

    rules: RuleSet | None  # policy; ``None`` to run FP32 alone (``--ranges``)
    author_rules: RuleSet  # rules that autocast regions in the model's code follow
    number_format: NumberFormat  # the 16-bit format
    device: torch.device  # device of the run
    seed: int = 0  # seed of all random numbers
    backend: Backend | None = None  # backend of the 16-bit run; ``None`` for the usual one of the device
    # measurements of a first pass, for the policy's measured rules
    measured: Mapping[SiteId, Measurement] = field(default_factory=dict)
    reference_only: bool = False  # whether only FP32 runs, on the graph with the policy's casts
    # rewrites of ops by site, to try changes to the model's code
    edits: Mapping[SiteId, Edit] = field(default_factory=dict)
    # whether to keep the graph of every batch, rather than only those that add sites
    keep_graphs: bool = False
    # function that receives the outputs of each batch, in both passes
    keep_outputs: KeepOutputs | None = None
    release: Release | None = None  # function that frees the memory of a weight until its next use
    # functions that make the recorders of the run
    recorders: tuple[Callable[[RunConfig], Recorder], ...] = ()
    # whether the graph is made functional: writes in place become new values, so that each value has one
    # gradient
    functionalize: bool = False
    # scale of the loss, which is the last output; ``None`` without a backward pass
    loss_scale: StartingScale | None = None
    # accuracy of an output in dB below which to search for the op at which its error enters; ``None`` to skip
    # the search
    min_sqnr: float | None = None
    steps: Steps | None = None  # steps of each batch; calls are numbered through all steps of all batches
    against: Against | None = None  # reference model, if it is not the audited one in FP32
    # limit on weights and values in bytes, which cuts the program into segments that all batches pass one
    # after the other; ``None`` to run whole batches
    memory: int | None = None

    @property
    def trains(self) -> bool:
        """Whether gradients of a loss are audited."""
        return self.loss_scale is not None

    def trace_config(
        self, rules: RuleSet, author_rules: RuleSet, number: int, path: PathTracing
    ) -> TraceConfig:
        """Return the configuration that traces the model under these rules, for the call with this number."""
        return TraceConfig(
            rules,
            author_rules,
            self.number_format,
            edits=self.edits,
            differentiated=self.trains,
            seed=self.seed + number,
            follow_backward=self.trains or None,
            path=path,
        )

    def call_name(self, number: int) -> str:
        """Return the name of the call with this index, such as ``step 2`` or ``step 1 of batch 2``."""
        if self.steps is None:
            return f"batch {number + 1}"
        batch, step = divmod(number, self.steps.count)
        return f"step {step + 1}" + (f" of batch {batch + 1}" if batch else "")

    @property
    def fp32_only(self) -> bool:
        """Whether nothing runs in 16 bits."""
        return self.rules is None or self.reference_only
