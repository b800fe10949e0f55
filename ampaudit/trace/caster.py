"""Decides and casts, op by op, while the model is being traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.policy import Decision, OpFacts, RuleSet
from ampaudit.policy.schema import Cast
from ampaudit.trace.autocast_state import RegionKind, current_region
from ampaudit.trace.opnames import (
    CASTABLE,
    deciding_name,
    is_composite,
    kept_whole,
    mutated_arguments,
    op_name,
)

__all__ = ["Call", "Caster", "OpRecord"]

AUTHOR_DISABLED = Decision(
    Cast.FOLLOW, "author/autocast-disabled", "author", "the model's code switches autocast off here"
)
IMPLICIT_CAST = Decision(Cast.FOLLOW, None, "cast", "inserted for the op that uses it")

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class OpRecord:
    """What was decided about one recorded op.

    Attributes:
        decision: what was done to it and why.
        inserted: whether it is a cast that the policy added.
        replayed: metadata of the exported node that it replays, if the model is an exported program.
    """

    decision: Decision
    inserted: bool = False
    replayed: Mapping[str, Any] | None = None


class Caster:
    """Applies a rule set to each op as it is traced.

    One cast is made per tensor, state and dtype: later uses share it until the tensor is written. The cache
    keeps the tensors alive, so an id is never used twice.
    """

    def __init__(self, rules: RuleSet, author_rules: RuleSet, dtype: torch.dtype) -> None:
        self.rules = rules
        self.author_rules = author_rules
        self.dtype = dtype
        self._casts: dict[tuple[int, int, torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # writes so far by storage: fake tensors do not count versions while they are traced
        self._writes: Counter[int] = Counter()

    def note_writes(self, op: OpOverload, args: tuple[Any, ...]) -> None:
        """Remember that an op wrote to its arguments: casts made of them before are out of date."""
        for position in mutated_arguments(op):
            if position < len(args) and isinstance(args[position], torch.Tensor):
                self._writes[_storage(args[position])] += 1

    def decide(self, op: OpOverload, layer: str) -> tuple[Decision, torch.dtype]:
        """The decision for an op of a layer, and the 16-bit dtype that it means."""
        region = current_region(self.rules.file.autocast, self.dtype)
        if region.kind is RegionKind.DISABLED:
            return AUTHOR_DISABLED, self.dtype
        rules, dtype = self.rules, self.dtype
        if region.kind is RegionKind.OWN and region.dtype is not None:
            rules, dtype = self.author_rules, region.dtype
        names = (op_name(op), deciding_name(op))
        facts = [OpFacts(n, layer, str(dtype).removeprefix("torch.")) for n in names if n is not None]
        decisions = [rules.decide(fact) for fact in facts]
        return next((d for d in decisions if d.explicit), decisions[0]), dtype

    def splits(self, op: OpOverload, decision: Decision) -> bool:
        """Whether to trace what a composite op consists of: a rule may mention its parts."""
        return not decision.explicit and is_composite(op) and not kept_whole(op)

    def apply(
        self,
        decision: Decision,
        dtype: torch.dtype,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cast: Call,
        tracer_id: int,
    ) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
        """The op and the arguments to trace instead, with casts made through ``cast(tensor, dtype)``."""
        kind = decision.cast
        if kind is Cast.SET_DTYPE:
            return op, args, _with_dtype(op, args, kwargs)
        if kind is Cast.APPEND_DTYPE:
            return _appended(op), args, kwargs | {"dtype": torch.float32}
        target = self._target(kind, dtype, args, kwargs)
        if target is None:
            return op, args, kwargs

        def convert(value: Any) -> Any:
            if not _castable(value) or value.dtype == target:
                return value
            key = (id(value), self._writes[_storage(value)], target, tracer_id)
            if key not in self._casts:
                self._casts[key] = (value, cast(value, target))
            return self._casts[key][1]

        args, kwargs = pytree.tree_map(convert, (args, kwargs))
        return op, args, kwargs

    def _target(
        self, kind: Cast, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.dtype | None:
        if kind is Cast.LOWER:
            return dtype
        if kind in (Cast.FLOAT32, Cast.FORBID):
            return torch.float32
        if kind is Cast.WIDEST:
            found = {value.dtype for value in pytree.tree_leaves((args, kwargs)) if _castable(value)}
            return torch.float32 if torch.float32 in found else None
        return None


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in CASTABLE


def _with_dtype(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``dtype=float32`` where the caller left it unset; as autocast does, only for a 16-bit input."""
    names = [argument.name for argument in op._schema.arguments]
    position = names.index("dtype")
    given = args[position] if position < len(args) else kwargs.get("dtype")
    first = args[0] if args else kwargs.get(names[0])
    if given is None and _castable(first):
        return kwargs | {"dtype": torch.float32}
    return kwargs


def _appended(op: OpOverload) -> OpOverload:
    """The overload of the norm family that takes a dtype."""
    names = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}
    overload: OpOverload = getattr(op.overloadpacket, names[op._overloadname])
    return overload
