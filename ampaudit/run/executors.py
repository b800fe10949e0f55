"""Caches one executor per kind of call; a batch with new shapes or flags is traced again."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import nn

from ampaudit.core.errors import InputError
from ampaudit.policy import RuleSet, plain_fp32
from ampaudit.run.backends import choose_backend
from ampaudit.run.config import RunConfig
from ampaudit.run.device import refuse_larger_than_memory
from ampaudit.run.lockstep import CarriedState, LockStep, Pair
from ampaudit.run.program import Program, compile_program, widened_tensor
from ampaudit.run.record import RunRecord, takes_path
from ampaudit.source.interface import Batch
from ampaudit.trace import Site, trace
from ampaudit.trace.converted import ConvertedModel, attach_weights
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.flow import slices_taken
from ampaudit.trace.functional import functionalized
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.isolation import structural_copy
from ampaudit.trace.path.recorder import GivenValues, PathTracing, with_known_casts
from ampaudit.trace.state import PythonState, TraceCache, apply_changes, call_key

__all__ = ["ExecutorCache"]


class ExecutorCache:
    """Traces a model for each kind of call and compiles the trace.

    Models that count their calls, or draw random numbers in Python, are traced for each batch, on a copy
    that goes through the same Python states as the user's model would.

    Attributes:
        model: The user's model, or its copy in the state before the next batch.
        backend: Backend of all executors.
        sites: Sites of all graphs, by id.
        parameter_free: Ids of sites that do not depend on a parameter.
        converted: Graphs that add sites or slices of parameters, or all graphs (``keep_graphs``).
        programs: Programs traced for a policy with measured rules.
    """

    def __init__(self, model: nn.Module, config: RunConfig, record: RunRecord) -> None:
        self.model = model
        self.backend = config.backend or choose_backend(config.device)
        self.sites: dict[str, Site] = {}
        self.parameter_free: set[str] = set()
        self.converted: list[ConvertedModel] = []
        self.programs: list[Program] = []
        self._config = config
        self._record = record
        self._is_copy = False
        self._path = PathTracing.FALLBACK
        self._executors: TraceCache[LockStep] = TraceCache()
        self._slices: set[tuple[str, int | None]] = set()

    def get(
        self,
        batch: Batch,
        number: int,
        low_batch: Batch | None = None,
        buffers: Mapping[str, Pair] | None = None,
    ) -> LockStep:
        """Return the executor for a batch, traced on first use; arguments as for ``Runner.prepare``."""
        rules = usual = self._config.rules or plain_fp32()
        carried = CarriedState(tensor_leaves(batch.args, batch.kwargs), buffers or {})
        if low_batch is not None:
            rules, batch = _for_carried_inputs(rules, low_batch)
        key = (rules is usual, *call_key(batch.args, batch.kwargs))
        executor = self._executors.find(key, lambda known: self._suits(known, carried, number))
        if executor is None:
            state = PythonState(self.model)
            executor = self._traced(batch, number, rules, carried)
            self._record.traces += 1
            if not executor.program.traced.random_constants:
                self._executors.keep(key, state, executor)
        self._follow(executor.program.traced)
        return executor

    def number_of(self, program: Program) -> int:
        """Return the index of a program in ``programs``."""
        return next(number for number, other in enumerate(self.programs) if other is program)

    def _suits(self, executor: LockStep, carried: CarriedState, number: int) -> bool:
        """Return whether a batch may reuse the trace of an earlier one."""
        on_path = executor.program.traced.path is not None
        return not on_path or takes_path(executor, list(carried.inputs), carried, self._config.seed + number)

    def _traced(self, batch: Batch, number: int, rules: RuleSet, carried: CarriedState) -> LockStep:
        started = time.perf_counter()
        config = self._config
        author_rules = config.author_rules if config.rules else plain_fp32()
        sites = tuple(self.sites.values())
        traced = trace(
            *(self.model, batch.args, batch.kwargs, rules, author_rules, config.number_format),
            measured=config.measured,
            edits=config.edits,
            differentiated=config.trains,
            seed=config.seed + number,
            trace_backward=config.trains,
            path=self._path,
            known=sites,
            values=GivenValues(carried.inputs, {name: pair[0] for name, pair in carried.buffers.items()}),
        )
        if traced.path is not None:
            self._path = PathTracing.ON  # skip the general trace from now on
            traced = with_known_casts(traced, sites)
        refuse_larger_than_memory(traced.graph, config.device)
        if not traced.outputs:
            raise InputError(
                f"{type(self.model).__name__} returns no tensor: there is nothing to compare",
                hint="return the tensors that are used; None, generators and numbers have no dtype to audit",
            )
        traced = functionalized(traced) if config.functional else traced
        converted = attach_weights(traced, config.release)
        self._record.add_seconds("trace", time.perf_counter() - started)
        program = compile_program(traced, config.device)
        executor = LockStep(
            *(program, converted, self.backend, config.device),
            reference_only=config.fp32_only,
            by_segment=config.memory is not None,
        )
        if rules.measured:
            self.programs.append(program)
        slices = slices_taken(traced)
        new = not self._slices >= slices or any(site.id not in self.sites for site in traced.sites)
        if config.keep_graphs or new or not self.converted:
            self.converted.append(converted)
        self._slices |= slices
        for site in traced.sites:
            self.sites.setdefault(site.id, site)
        free = {node.name for node in program.parameter_free}
        self.parameter_free |= {site.id for site in traced.sites if site.node in free}
        return executor

    def _follow(self, traced: TracedModel) -> None:
        """Apply the effects of a call on Python state to a copy of the user's model."""
        if not any(change.plain for change in traced.changes):
            return
        if not self._is_copy or traced.reads:  # with reads, the model in its earlier state is run as well
            tensors = named_tensors(self.model).values()
            self.model = structural_copy(self.model, {id(t): t for t in tensors})
            self._executors, self._is_copy = TraceCache(), True
        apply_changes(traced.changes, PythonState(self.model))


def _for_carried_inputs(rules: RuleSet, batch: Batch) -> tuple[RuleSet, Batch]:
    """Return the rules and inputs of a call whose inputs come from an earlier call.

    CarriedState inputs keep their dtype where only the user's own cast makes inputs 16 bits, as under
    ``model.half()``; a policy that casts outputs as well casts inputs at each call. Policies that act on the
    FP32 graph trace the model with FP32 inputs.
    """
    weights = rules.file.weights
    if rules.file.level == "graph":
        return rules, batch.mapped(widened_tensor)
    if weights.inputs == "lower" and weights.outputs == "unchanged":
        weights = weights.model_copy(update={"inputs": "unchanged"})
        file = rules.file.model_copy(update={"weights": weights})
        rules = RuleSet(file, rules.ops, rules.environment, rules.location)
    return rules, batch
