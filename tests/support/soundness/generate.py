"""Branches from seeds: compositions of up to six steps out of templates and ATen's schemas."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch._ops import OpOverload

from ampaudit.bounds.transfers import TRANSFERS
from tests.support.soundness import schemas, steps
from tests.support.soundness.draft import Draft, Refused
from tests.support.soundness.program import Branch

ATTEMPTS = 12


@cache
def covered() -> tuple[OpOverload, ...]:
    """Overloads that a transfer is registered for, and their other overloads."""
    bases = {key if isinstance(key, str) else _base(key) for key in _keys()}
    return tuple(
        op for base in sorted(bases) for name in (base, base + "_") for op in schemas.overloads(name)
    )


def _keys() -> Iterable[str | OpOverload]:
    return list(TRANSFERS)


def _base(op: OpOverload) -> str:
    return op._schema.name.split("::")[1]


def branch_of(seed: int, lower: torch.dtype | None) -> Branch:
    """One random branch.

    Args:
        seed: the same branch for the same seed.
        lower: the dtype of inputs and parameters, if the policy stores them in 16 bits.
    """
    draft = Draft(seed, lower)
    for _ in range(draft.random.choice((1, 1, 2, 2, 3, 4, 5, 6))):
        for _ in range(ATTEMPTS):
            try:
                draft.write(_template(draft))
                break
            except Refused:
                continue
    if not draft.lines:
        draft.write(f"A = {draft.inputs[0].name} * 1")
    return draft.branch()


def _template(draft: Draft) -> str:
    kind = draft.random.choices(
        ("schema", "any", "step", "whole", "alike", "written"), (30, 4, 36, 10, 12, 8)
    )[0]
    if kind == "schema":
        return schemas.call_of(draft, draft.random.choice(covered()))
    if kind == "any":
        return schemas.call_of(draft, draft.random.choice(_any_overload(draft)))
    texts = {
        "step": steps.STEPS,
        "whole": steps.INTEGERS,
        "alike": steps.LOOKALIKES,
        "written": steps.IN_PLACE,
    }
    return draft.random.choice(texts[kind])


def _any_overload(draft: Draft) -> tuple[OpOverload, ...]:
    return schemas.overloads(draft.random.choice(schemas.every_base()))
