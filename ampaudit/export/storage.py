"""Decides the stored dtype of each tensor of a checkpoint, by a plan, or by name and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ampaudit.checkpoint.header import FLOAT_TYPES, TensorEntry
from ampaudit.checkpoint.open import Checkpoint
from ampaudit.checkpoint.parts import type_name
from ampaudit.core.errors import UsageError
from ampaudit.core.formats import NumberFormat
from ampaudit.policy import OpFacts, RuleSet
from ampaudit.policy.matching import matches_any
from ampaudit.policy.schema import Cast, KeepFp32
from ampaudit.trace.values import torch_dtype

__all__ = [
    "CASTABLE_TYPES",
    "StorageDecision",
    "decide_as_planned",
    "decide_by_name",
]

CASTABLE_TYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class StorageDecision:
    """The decision about one tensor.

    Attributes:
        dtype: Stored safetensors type.
        reason: Short reason.
        parameter: Name in the model, if the model is known.
    """

    dtype: str
    reason: str
    parameter: str | None = None


def decide_by_name(checkpoint: Checkpoint, rules: RuleSet, form: NumberFormat) -> dict[str, StorageDecision]:
    """Decide for a checkpoint without its model.

    A policy that stores 16 bits is followed, except for its rules about modules. For a policy that casts at
    each use, such as autocast, operands of matrix products are stored in 16 bits: tensors of two or more
    dimensions, but not vectors (biases, norms, statistics). A policy that casts no matrix product changes
    nothing.

    Raises:
        UsageError: The policy has rules that need the model.
    """
    weights = rules.file.weights
    keep = [rule for rule in weights.keep if not rule.dtype or form.name in rule.dtype]
    if any(rule.model or rule.module or rule.attributes for rule in keep):
        raise UsageError(
            f"policy {rules.name!r} stores weights by the class of their module, and a checkpoint has none",
            hint="convert the model, or choose --policy half",
        )
    low_dtype = type_name(torch_dtype(form), form.name)
    scope = _scope(rules, form)
    castable = CASTABLE_TYPES if weights.storage != "lower" or weights.casts == "float32" else FLOAT_TYPES
    return {
        name: _by_rule(entry, scope, keep, low_dtype)
        if entry.dtype in castable
        else StorageDecision(entry.dtype, "not a floating-point type that is cast")
        for name, entry in checkpoint.entries.items()
    }


def _scope(rules: RuleSet, form: NumberFormat) -> Literal["all", "matrices", "none"]:
    """Return the set of weights, known only by name, that a policy casts."""
    if rules.file.weights.storage == "lower":
        return "all"
    product = rules.decide(OpFacts("linear", "", form.name))
    return "matrices" if product.cast in (Cast.LOWER, Cast.ALLOW) else "none"


def _by_rule(entry: TensorEntry, scope: str, keep: Iterable[KeepFp32], low_dtype: str) -> StorageDecision:
    if any(matches_any(rule.parameter, entry.name) for rule in keep):
        return StorageDecision(entry.dtype, "the policy keeps it")
    if scope == "none":
        return StorageDecision(entry.dtype, "the policy casts no matrix product")
    if scope == "matrices" and len(entry.shape) < 2:
        return StorageDecision(entry.dtype, "a vector: biases, norms and statistics stay")
    return StorageDecision(low_dtype, "the policy stores it in 16 bits")


def decide_as_planned(
    checkpoint: Checkpoint, planned: Mapping[str, tuple[str, str]], names: Mapping[str, str]
) -> dict[str, StorageDecision]:
    """Decide by a plan.

    Args:
        checkpoint: Tensors.
        planned: Type and reason by parameter; other tensors stay unchanged.
        names: Name in the model of each tensor whose name there differs.
    """
    decisions: dict[str, StorageDecision] = {}
    for name, entry in checkpoint.entries.items():
        parameter = names.get(name, name)
        dtype, reason = planned.get(parameter, (entry.dtype, "the graph does not use it"))
        if entry.dtype not in FLOAT_TYPES or dtype not in CASTABLE_TYPES or dtype == "F32":
            dtype = entry.dtype  # stored tensors are never widened
        decisions[name] = StorageDecision(dtype, reason, parameter=parameter)
    return decisions
