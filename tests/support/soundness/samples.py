"""Torch's own sample inputs: each op as a program of one step, on the ranges of its sample and wider ones."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ampaudit.bounds import bound
from ampaudit.core.assumptions import Assumption
from ampaudit.core.errors import AuditError
from ampaudit.core.formats import format_named
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, TracedModel, trace
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.graph import Slot
from tests.support.native import Call, Calls, sample_calls
from tests.support.soundness.check import Runs
from tests.support.soundness.fuzz import Setting
from tests.support.soundness.inputs import KINDS, values

WIDER = (1.0, 4.0)  # ranges, in multiples of the sample's own


def sample_problems(info: Any, setting: Setting, count: int) -> list[str]:
    """What escapes, or is raised by the bound pass, for some samples of an op."""
    problems = []
    for call in sample_calls(info, count, 1.0, setting.lower):
        problems += [
            f"{info.formatted_name}, {setting}, {_text(call)}: {p}" for p in _problems(call, setting)
        ]
    return problems


def _problems(call: Call, setting: Setting) -> list[str]:
    rules, author = load_policy(setting.policy), load_policy("torch-cuda")
    model = Calls(call.function, call.kwargs).eval()
    try:
        traced = trace(model, call.args, {}, TraceConfig(rules, author, format_named(setting.dtype)))
    except AuditError:
        return []
    leaves = tensor_leaves(call.args, {})
    if any(leaf.is_complex() for leaf in leaves):
        return []
    return [problem for wider in WIDER for problem in _checked(traced, leaves, wider, setting)]


def _checked(
    traced: TracedModel, leaves: Sequence[torch.Tensor], wider: float, setting: Setting
) -> list[str]:
    ranges = [_range(leaf, wider) for leaf in leaves]
    places = [place for place in traced.placeholders if place.slot is Slot.INPUT]
    domain = {
        place.node: Assumption(place.name, low, high, "stated")
        for place, (low, high) in zip(places, ranges, strict=True)
    }
    try:
        table = bound(traced, domain, format_named(setting.dtype))
    except Exception as error:
        return [f"bound raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"]
    if table.failed:
        return [f"a transfer fails: {'; '.join(table.failed)}"]
    runs = Runs(traced)
    for kind in range(-1, KINDS):
        inputs = [_values(leaf, ends, kind) for leaf, ends in zip(leaves, ranges, strict=True)]
        for native in (True, False):
            if escapes := runs.checked(table, inputs, native=native).escapes:
                return [str(escapes[0])]
    return []


def _range(leaf: torch.Tensor, wider: float) -> tuple[float, float]:
    finite = leaf[leaf.isfinite()] if leaf.is_floating_point() else leaf.to(torch.int64)
    if not finite.numel():
        return -1.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if not leaf.is_floating_point():
        return low, high
    middle, half = (low + high) / 2, (high - low) / 2
    return middle - half * wider, middle + half * wider


def _values(leaf: torch.Tensor, ends: tuple[float, float], kind: int) -> torch.Tensor:
    """The sample's own values first; later those of a kind, where they are real numbers."""
    if kind < 0 or not leaf.is_floating_point():
        return leaf.nan_to_num(0.0, *reversed(ends)) if leaf.is_floating_point() else leaf
    seed = zlib.crc32(f"{tuple(leaf.shape)} {kind}".encode())
    made = values(tuple(leaf.shape), *ends, kind, seed).clamp(*ends)
    return made.to(leaf.dtype) if all(map(math.isfinite, ends)) else leaf


def _text(call: Call) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype)[6:]}{list(value.shape)}"
        return repr(value)

    given = [shown(arg) for arg in call.args] + [f"{k}={shown(v)}" for k, v in call.kwargs.items()]
    return f"({', '.join(given)})"
