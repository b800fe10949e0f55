"""One function of tensors, run by torch's own 16-bit kernels and by the emulated run of an audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ampaudit.core.formats import BFLOAT16, FLOAT16, NumberFormat
from ampaudit.policy import load_policy
from ampaudit.run.backends import Emulated
from ampaudit.run.lockstep import LockStep, Observer
from ampaudit.run.program import compile_program
from ampaudit.trace import TraceConfig, TracedModel, trace
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.graph import Slot

Function = Callable[..., Any]
FORMATS: dict[torch.dtype, NumberFormat] = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


@dataclass(frozen=True)
class Emulation:
    """The audit's 16-bit values, the dtype of each in the graph, and the graph."""

    values: list[torch.Tensor]
    dtypes: list[torch.dtype]
    traced: TracedModel


class Calls(nn.Module):
    """A model that calls one function."""

    def __init__(self, function: Function, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.kwargs = kwargs

    def forward(self, *args: Any) -> Any:
        return self.function(*args, **self.kwargs)


def run_converted(traced: TracedModel, inputs: list[torch.Tensor]) -> Any:
    """What a traced graph gives for a batch, with weights and inputs in the dtypes that it stores."""
    converted, remaining = attach_weights(traced), iter(inputs)
    values: list[torch.Tensor] = []
    for place in traced.placeholders:
        value = next(remaining) if place.slot is Slot.INPUT else converted.masters[place.node].detach()
        if place.node in converted.copies:
            value = converted.unrounded(place.node, value)
        values.append(value.to(place.dtype) if value.is_floating_point() else value)
    return fx.GraphModule({}, traced.graph)(*values)


def emulated(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    policy: str = "half",
) -> Emulation:
    """What the audited model gives under a policy, on inputs of the dtypes that are given."""
    model = Calls(function, kwargs or {}).eval()
    traced = trace(
        model, args, {}, TraceConfig(load_policy(policy), load_policy("torch-cuda"), FORMATS[dtype])
    )
    cpu = torch.device("cpu")
    executor = LockStep(compile_program(traced, cpu), attach_weights(traced), Emulated(), cpu)
    torch.manual_seed(0)
    pairs = executor.run(tensor_leaves(args, {}), Observer())
    nodes = traced.graph.output_node().args[0]
    assert isinstance(nodes, list | tuple)
    return Emulation([value for _, value in pairs], [node.meta["val"].dtype for node in nodes], traced)


def native(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """What torch gives, on copies of the same tensors."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs or {}))
    torch.manual_seed(0)
    with torch.no_grad():
        return [
            leaf for leaf in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)
        ]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every float32 and float64 tensor in a 16-bit dtype."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.dtype in (torch.float32, torch.float64) else t, value
    )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def verdict(tensor: torch.Tensor) -> str:
    """What an audit would say of a value: ``finite``, ``inf`` or ``nan``."""
    parts = _real(tensor)
    return "nan" if bool(parts.isnan().any()) else "inf" if bool(parts.isinf().any()) else "finite"


def ulps(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest difference between finite elements, in units of the format's eps times the peak."""
    a, b = (
        torch.view_as_real(t.to(torch.complex128)) if t.is_complex() else t.double() for t in (first, second)
    )
    both = a.isfinite() & b.isfinite()
    if not bool(both.any()):
        return 0.0
    form = torch.finfo(dtype)
    peak = max(float(a[both].abs().max()), form.smallest_normal)
    return float((a - b)[both].abs().max()) / (peak * form.eps)


@dataclass(frozen=True)
class Call:
    """One call of a function with its arguments."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """How the audit's result of one call differs from torch's, if it does."""

    kind: str
    detail: str = ""

    def rank(self) -> int:
        """Larger is worse."""
        return _KINDS.index(self.kind)


_KINDS = ["native raises", "same", "not traced", "ulps", "decisions", "verdict", "shape", "dtype"]
# a sum of float32 products in another order, and one rounding more or less: both sides err by half an ulp
_ULPS = 2.0
# they draw random numbers, or show uninitialized memory
_UNSTEADY = frozenset(
    """
    bernoulli cauchy empty empty_like empty_permuted empty_strided exponential geometric item log_normal
    multinomial new_empty new_empty_strided nn.functional.alpha_dropout nn.functional.dropout
    nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout nn.functional.rrelu
    nn.functional.scaled_dot_product_attention normal pca_lowrank rand_like randint randint_like randn
    randn_like svd_lowrank uniform
    """.split()
)


def sample_calls(info: Any, count: int, scale: float, dtype: torch.dtype | None) -> list[Call]:
    """Some of torch's own samples of an op, evenly spaced; ``dtype`` is theirs after scaling."""
    if (
        info.name in _UNSTEADY
        or info.name.startswith(("jiterator", "sparse", "to_sparse"))
        or torch.float32 not in info.dtypes
    ):
        return []
    torch.manual_seed(0)
    try:
        samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=False))
    except (RuntimeError, AttributeError):
        return []
    calls = []
    for sample in samples[:: max(1, len(samples) // count)][:count]:
        given = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (sample.input, *sample.args))
        named = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, sample.kwargs)
        if dtype is not None:
            given, named = cast(_scaled((given, named), scale), dtype)
        calls.append(Call(info.op, given, named))
    return calls


def _scaled(value: Any, scale: float) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t * scale if t.is_floating_point() else t, value)


def compared(call: Call, dtype: torch.dtype, policy: str) -> Comparison:
    """Run a call natively (under real autocast for an autocast policy) and under audit."""
    try:
        with torch.autocast("cpu", dtype, enabled=policy == "torch-cpu", cache_enabled=False):
            expected = native(call.function, call.args, call.kwargs)
    except Exception as error:  # whatever torch raises is its answer
        return Comparison("native raises", str(error).partition("\n")[0][:80])
    try:
        found = emulated(call.function, call.args, call.kwargs, dtype=dtype, policy=policy)
    except Exception as error:
        return Comparison("not traced", str(error).partition("\n")[0][:80])
    worst = Comparison("same")
    for torchs, ours, ours_dtype in zip(expected, found.values, found.dtypes, strict=False):
        worst = max(worst, difference(torchs, ours, ours_dtype, dtype), key=Comparison.rank)
    return worst


def difference(
    torchs: torch.Tensor, ours: torch.Tensor, ours_dtype: torch.dtype, dtype: torch.dtype
) -> Comparison:
    """How one output of the audit differs from torch's."""
    if torchs.dtype != ours_dtype:
        return Comparison("dtype", f"{torchs.dtype}, audit {ours_dtype}")
    if torchs.shape != ours.shape:
        return Comparison("shape", f"{tuple(torchs.shape)}, audit {tuple(ours.shape)}")
    if not (torchs.is_floating_point() or torchs.is_complex()):
        return Comparison("same") if torch.equal(torchs, ours) else Comparison("decisions")
    if verdict(torchs) != verdict(ours):
        return Comparison("verdict", f"{verdict(torchs)}, audit {verdict(ours)}")
    distance = ulps(torchs, ours, dtype)
    return Comparison("ulps", f"{distance:.3g}") if distance > _ULPS else Comparison("same")
