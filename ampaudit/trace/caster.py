"""Decides and casts op by op while the model is traced."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId, SiteNumbering
from ampaudit.policy import Decision, OpFacts, RuleSet
from ampaudit.policy.schema import COLORS, Cast
from ampaudit.trace.autocast_state import Region, RegionKind, current_region, region_switched_on
from ampaudit.trace.edits import Edit, History
from ampaudit.trace.facts import FactFinder
from ampaudit.trace.kernels import KernelTrials
from ampaudit.trace.op_calls import (
    OpCalled,
    refuse_mixed_product,
    with_dtype,
    with_dtype_overload,
    with_low_precision_dtype,
    with_stored_numbers,
)
from ampaudit.trace.opnames import (
    InnerOps,
    argument_names,
    base_name,
    is_composite,
    op_name,
    stays_whole,
    written_values,
)
from ampaudit.trace.replay import OPAQUE, OpRecord, replayed_meta, replayed_record
from ampaudit.trace.twin_call import OpenTwins
from ampaudit.trace.values import CASTABLE_DTYPES, dtype_name, storage_id

__all__ = [
    "HALF_FOURIER",
    "MIXED_DTYPES",
    "NO_KERNEL",
    "TOO_LARGE",
    "TWIN",
    "Call",
    "Caster",
    "mixed_dtypes",
    "too_large",
]

AUTHOR_DISABLED = Decision(
    Cast.FOLLOW, "author/autocast-disabled", "author", "the model's code switches autocast off here"
)
INSIDE = Decision(Cast.FOLLOW, None, "default", "inside an op with its own graph, which stays in float32")
NO_KERNEL = Decision(
    Cast.FORBID, None, "no-kernel", "torch has no 16-bit kernel for it; the audit continued in float32"
)
HALF_FOURIER = Decision(
    Cast.FOLLOW, None, "no-kernel", "CPUs have no float16 kernel for it; the audit does what CUDA's does"
)
TWIN = "twin"  # why a policy does not decide
MIXED_DTYPES = "mixed-dtypes"
TOO_LARGE = "number-too-large"
INSIDE_TWIN = Decision(
    Cast.FOLLOW, None, TWIN, "what a kernel computes inside follows its inputs; no policy reaches it"
)
BACKWARD = Decision(Cast.FOLLOW, None, "default", "in the backward pass, where autocast is off")
IMPLICIT_CAST = Decision(Cast.FOLLOW, None, "cast", "inserted for the op that uses it")

Call = Callable[..., Any]


def mixed_dtypes(complaint: str) -> Decision:
    """The decision for an op that rejects its mix of dtypes, with torch's words."""
    return Decision(Cast.FLOAT32, None, MIXED_DTYPES, f"torch rejects these dtypes: {complaint}")


def too_large(number: str) -> Decision:
    """The decision for an op that rejects a number, since the dtype of its tensor does not hold it."""
    why = f"torch rejects {number}: value cannot be converted without overflow"
    return Decision(Cast.FLOAT32, None, TOO_LARGE, why)


class Caster:
    """Applies a rule set to each op as it is traced.

    Casts are shared: there is one per tensor and dtype until the tensor is written. The cache keeps the
    tensors alive, so that no id is reused.

    Args:
        rules: The policy.
        author_rules: Rules inside an autocast region of the model's code.
        dtype: The 16-bit format of the run.
        facts: Extracts the facts about an op call.
        planned: Decisions made on the whole graph, by site.
        edits: Ops to rewrite, by site.
        numbering: Makes the numbering that assigns ids to ops.

    Attributes:
        backward_name: Name of the custom backward that is being traced, or ``None``.
    """

    def __init__(
        self,
        rules: RuleSet,
        author_rules: RuleSet,
        dtype: torch.dtype,
        facts: FactFinder,
        planned: Mapping[SiteId, Decision],
        edits: Mapping[SiteId, Edit],
        numbering: Callable[[], SiteNumbering] = SiteNumbering,
    ) -> None:
        self._edits = edits
        self.history = History()
        self.rules = rules
        self.author_rules = author_rules
        self.dtype = dtype
        self._facts = facts
        self._planned = planned
        self._numbering: defaultdict[int, SiteNumbering] = defaultdict(numbering)
        self._inner = InnerOps()
        self._casts: dict[tuple[int, int, torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # writes so far by storage: fake tensors do not count versions while they are traced
        self._writes: Counter[int] = Counter()
        self._region: Region | None = None
        self.backward_name: str | None = None
        self.kernels = KernelTrials()
        self.twins = OpenTwins()
        self._alive: list[Any] = []

    @contextmanager
    def in_backward(self, name: str) -> Iterator[None]:
        """While active, attribute ops to a custom backward as their layer; results stay alive."""
        self.backward_name = name
        try:
            yield
        finally:
            self.backward_name = None
            self._alive.clear()

    def write_count(self, tensor: torch.Tensor) -> int:
        """Count the writes to a tensor's memory so far."""
        return self._writes[storage_id(tensor)]

    def layer(self, layer: tuple[str, str]) -> tuple[str, str]:
        """The layer whose op is being traced, or the custom backward."""
        return layer if self.backward_name is None else (self.backward_name, layer[1])

    def region(self) -> Region:
        """The autocast region of the model's code, or of the op around ``vmap``."""
        return self._region or current_region(self.rules.file.autocast, self.dtype)

    @contextmanager
    def in_region(self, region: Region) -> Iterator[None]:
        """While active, place ops in this region, whatever the dispatcher says."""
        before, self._region = self._region, region
        try:
            yield
        finally:
            self._region = before

    def splits(self, called: OpCalled) -> bool:
        """Return whether to trace the parts of an op, since autocast casts them (``bmm`` in ``einsum``)."""
        op = called.op
        if self.backward_name is not None and torch.is_grad_enabled():
            return is_composite(op)  # tensors that autograd saves in a part must be values of the trace
        region = self.region()
        rules = self.author_rules if region.kind is RegionKind.OWN else self.rules
        if is_composite(op) and not stays_whole(op):
            return op_name(op) not in rules.op_names
        if not rules.file.autocast or region.kind is RegionKind.DISABLED or op_name(op) in rules.op_names:
            return False
        return self._inner.mentioned(op, called.args, called.kwargs, rules.op_names)

    def site_of(self, op: OpOverload, layer: str, tracer_id: int) -> SiteId:
        """Return the id of the op that is traced next."""
        replayed = replayed_record()
        around = layer if self.twins.innermost is None else self.twins.innermost.site
        return (replayed and replayed.site) or self._numbering[tracer_id].next_id(around, base_name(op))

    def edited(self, site: SiteId, called: OpCalled, emit: Call) -> OpCalled:
        """Return the op to trace at a site: the model's own, or an edited one."""
        edit = self._edits.get(site)
        return called if edit is None else edit(called, self.history, emit)

    def note(self, result: Any, traced: OpCalled, called: OpCalled) -> None:
        """Record the result and writes of an op and, for edits, its uncast call."""
        for value in written_values(traced.op, traced.args, traced.kwargs):
            if isinstance(value, torch.Tensor):
                self._writes[storage_id(value)] += 1
        if self.backward_name is not None:
            self._alive.append(result)  # autograd may have saved what the code itself has dropped
        if any(edit.looks_back for edit in self._edits.values()):
            self.history.note(result, called)

    def decide(self, site: SiteId, called: OpCalled, layer: tuple[str, str]) -> tuple[OpRecord, torch.dtype]:
        """Return the decision for an op of a layer (path, class name), and the 16-bit dtype it implies."""
        op, args, kwargs = called.op, called.args, called.kwargs
        region = self.region()
        facts = self._facts.of(op, args, kwargs, *layer, site)
        replayed = replayed_record()
        backward = self.backward_name is not None or (replayed is not None and replayed.in_backward)
        decision, dtype = (
            self._backward_decision(facts, called) if backward else self._decision(facts, region)
        )
        twin = self.twins.outermost or (None if replayed is None else replayed.twin)
        return OpRecord(decision, site, None if backward else facts, in_backward=backward, twin=twin), dtype

    def _backward_decision(self, facts: OpFacts, called: OpCalled) -> tuple[Decision, torch.dtype]:
        """Let ops follow the dtypes of their inputs, unless the code enables autocast."""
        region = region_switched_on(self.rules.file.autocast, self.dtype)
        if region is not None:
            return self._decision(facts, region)
        if self.backward_name is not None:
            refuse_mixed_product(called)
        return BACKWARD, self.dtype

    def _decision(self, facts: OpFacts, region: Region) -> tuple[Decision, torch.dtype]:
        if region.kind is RegionKind.DISABLED:
            return AUTHOR_DISABLED, self.dtype
        if (replayed_meta() or {}).get(OPAQUE):
            return INSIDE, self.dtype
        if facts.site in self._planned:
            return self._planned[SiteId(facts.site)], self.dtype
        if self.twins.innermost is not None and self.rules.file.level == "calls":
            return INSIDE_TWIN, self.dtype
        rules, dtype = self.rules, self.dtype
        if region.kind is RegionKind.OWN and region.dtype is not None:
            rules, dtype = self.author_rules, region.dtype
            facts = replace(facts, dtype=dtype_name(dtype))
        return rules.decide(facts), dtype

    def apply(
        self, decision: Decision, dtype: torch.dtype, called: OpCalled, cast: Call, tracer_id: int
    ) -> OpCalled:
        """Return the call to trace instead, with casts made through ``cast(tensor, dtype)``.

        An argument that the op writes to is never cast, since the write would be lost. Where the rule asks
        for a cast, the other arguments take the dtype of that argument.
        """
        kind = decision.cast
        if kind is Cast.SET_DTYPE:
            return with_dtype(called)
        if kind is Cast.APPEND_DTYPE:
            return with_dtype_overload(called)
        values = written_values(called.op, called.args, called.kwargs)
        destinations = [value for value in values if _castable(value)]
        target = self._target(kind, dtype, called)
        if target is not None and destinations:
            target = destinations[0].dtype
        if kind is Cast.LOWER and self.rules.file.level == "graph":
            called = with_low_precision_dtype(called, dtype)

        def convert(value: Any, to: torch.dtype | None) -> Any:
            if kind is Cast.FORBID and getattr(value, "dtype", None) is torch.complex32:
                return cast(value, torch.complex64)
            if not _castable(value) or any(value is w for w in destinations):
                return value
            # a weight that the code has overwritten no longer has its stored value
            stored = self._facts.is_rounded(value) and not self.write_count(value)
            if stored and to != dtype and value.dtype is torch.float32:
                rounded = self._shared_cast(value, dtype, cast, tracer_id)
                return self._shared_cast(rounded, torch.float32, cast, tracer_id)
            return value if to in (None, value.dtype) else self._shared_cast(value, to, cast, tracer_id)

        special = {"lower": dtype, "float32": torch.float32, "keep": None}
        exceptions = {name: special[how] for name, how in decision.arguments}

        def convert_all(name: str, value: Any) -> Any:
            to = exceptions.get(name, target)
            return pytree.tree_map(lambda leaf: convert(leaf, to), value)

        pairs = zip(argument_names(called.op), called.args, strict=False)
        args = tuple(convert_all(name, value) for name, value in pairs)
        kwargs = {name: convert_all(name, value) for name, value in called.kwargs.items()}
        return OpCalled(called.op, args, kwargs)

    def _shared_cast(self, value: torch.Tensor, to: torch.dtype, cast: Call, tracer_id: int) -> torch.Tensor:
        key = (id(value), self._writes[storage_id(value)], to, tracer_id)
        if key not in self._casts:
            self._casts[key] = (value, cast(value, to))
        return self._casts[key][1]

    def clipped(self, called: OpCalled, decision: Decision) -> tuple[OpCalled, dict[int | str, Any]]:
        """Clip or round Python numbers as converters do: operands become constants of the graph."""
        weights = self.rules.file.weights
        if decision.cast is not Cast.LOWER:
            return called, {}
        dtype = self.dtype if weights.numbers == "rounded" else None
        return with_stored_numbers(called, weights.clip, dtype)

    def _target(self, kind: Cast, dtype: torch.dtype, called: OpCalled) -> torch.dtype | None:
        if kind is Cast.LOWER:
            return dtype
        if kind in (Cast.FLOAT32, Cast.FORBID):
            return torch.float32
        if kind in (Cast.WIDEST, Cast.NARROWEST):
            dtypes = {
                value.dtype for value in pytree.tree_leaves((called.args, called.kwargs)) if _castable(value)
            }
            if kind is Cast.WIDEST:
                return torch.float32 if torch.float32 in dtypes else None
            return dtype if dtypes - {torch.float32} else None
        assert kind not in COLORS, "colors are resolved before anything is cast"
        return None


def _castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in CASTABLE_DTYPES
