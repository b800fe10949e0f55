"""Decides and casts op by op while the model is traced.

Models call ``torch.is_autocast_enabled()`` and disable regions with ``torch.autocast(enabled=False)``.
Both must behave as they would on the target device, also on a machine without CUDA.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.cuda.amp import common
from torch.nn.modules.rnn import RNNBase
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId, SiteNumbering
from ampaudit.policy import Decision, Measurement, OpFacts, RuleSet
from ampaudit.policy.decide import class_names
from ampaudit.policy.schema import COLORS, Cast
from ampaudit.trace.entry import layer_path
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.internals import Replacement, patched
from ampaudit.trace.kernels import KernelTrials
from ampaudit.trace.op_calls import (
    LOOKING_BACK,
    Edit,
    History,
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
from ampaudit.trace.twins import OpenTwins
from ampaudit.trace.values import CASTABLE_DTYPES, dtype_name, sizes_vary, storage_id

_DEVICES = ("cpu", "cuda")
# torch's own functions, also while those that the model's code calls are replaced
_enabled, _dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
# autocast for CUDA can be switched on, and in bfloat16, also on a machine without CUDA
_AVAILABLE = (
    Replacement(common, "amp_definitely_not_available", lambda: False),
    Replacement(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
)
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
TWIN = "twin"  # reason of a decision inside a twin
FIXED_REASONS = ("author", TWIN)  # reasons of decisions that no policy makes
MIXED_DTYPES = "mixed-dtypes"
TOO_LARGE = "number-too-large"
INSIDE_TWIN = Decision(
    Cast.FOLLOW, None, TWIN, "what a kernel computes inside follows its inputs; no policy reaches it"
)
BACKWARD = Decision(Cast.FOLLOW, None, "default", "in the backward pass, where autocast is off")
IMPLICIT_CAST = Decision(Cast.FOLLOW, None, "cast", "inserted for the op that uses it")

Call = Callable[..., Any]


@dataclass(eq=False)
class Caster:
    """Applies a rule set to each op as it is traced.

    Casts are shared: there is one per tensor and dtype until the tensor is written. The cache keeps the
    tensors alive, so that no id is reused. Where gradients flow, only casts of weights are shared, as by
    autocast: those of an activation add up in its own dtype.
    """

    rules: RuleSet
    author_rules: RuleSet  # inside an autocast region of the model's code
    dtype: torch.dtype  # the 16-bit format of the run
    facts: FactFinder
    planned: Mapping[SiteId, Decision]  # made on the whole graph
    edits: Mapping[SiteId, Edit]  # of ops to rewrite
    numberings: defaultdict[int, SiteNumbering]  # by tracer
    backward_name: str | None = None  # of the custom backward that is being traced

    def __post_init__(self) -> None:
        self.history = History()
        self.kernels = KernelTrials()
        self.twins = OpenTwins()
        self._inner = InnerOps()
        self._casts: dict[tuple[int, int, torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # writes so far by storage: fake tensors do not count versions while they are traced
        self._writes: Counter[int] = Counter()
        self._region: Region | None = None
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

    def region(self) -> Region:
        """Return the innermost autocast region of the model's code, or that of the op around ``vmap``."""
        if self._region is not None:
            return self._region
        by_policy = self.rules.file.autocast  # as ``autocast_visible`` sets the flags
        for enabled, dtype in ((_enabled(device), _dtype(device)) for device in _DEVICES):
            if by_policy and not enabled:
                return Region(enabled=False)
            if enabled and (not by_policy or dtype != self.dtype):
                return Region(dtype=dtype)
        return Region()

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
        rules = self.rules if region.dtype is None else self.author_rules
        if is_composite(op) and not stays_whole(op):
            return op_name(op) not in rules.op_names
        if not rules.file.autocast or not region.enabled or op_name(op) in rules.op_names:
            return False
        return self._inner.mentioned(op, called.args, called.kwargs, rules.op_names)

    def site_of(self, op: OpOverload, layer: str, tracer_id: int) -> SiteId:
        """Return the id of the op that is traced next."""
        replayed = replayed_record()
        around = layer if self.twins.innermost is None else self.twins.innermost.site
        return (replayed and replayed.site) or self.numberings[tracer_id].next_id(around, base_name(op))

    def note(self, result: Any, traced: OpCalled, called: OpCalled) -> None:
        """Record the result and writes of an op and, for edits, its uncast call."""
        for value in written_values(traced.op, traced.args, traced.kwargs):
            if isinstance(value, torch.Tensor):
                self._writes[storage_id(value)] += 1
        if self.backward_name is not None:
            self._alive.append(result)  # autograd may have saved what the code itself has dropped
        if any(edit in LOOKING_BACK for edit in self.edits.values()):
            self.history.note(result, called)

    def decide(self, site: SiteId, called: OpCalled, layer: tuple[str, str]) -> tuple[OpRecord, torch.dtype]:
        """Return the decision for an op of a layer (path, class name), and the 16-bit dtype it implies."""
        region = self.region()
        facts = self.facts.of(called, *layer, site)
        replayed = replayed_record()
        backward = self.backward_name is not None or (replayed is not None and replayed.in_backward)
        decision, dtype = (
            self._backward_decision(facts, called) if backward else self._decision(facts, region)
        )
        twin = self.twins.outermost or (None if replayed is None else replayed.twin)
        return OpRecord(decision, site, None if backward else facts, in_backward=backward, twin=twin), dtype

    def _backward_decision(self, facts: OpFacts, called: OpCalled) -> tuple[Decision, torch.dtype]:
        """Let ops follow the dtypes of their inputs, unless the code enables autocast."""
        dtypes = [_dtype(device) for device in _DEVICES if _enabled(device)]
        if dtypes:
            is_policy = self.rules.file.autocast and dtypes[0] == self.dtype
            return self._decision(facts, Region() if is_policy else Region(dtype=dtypes[0]))
        if self.backward_name is not None:
            refuse_mixed_product(called)
        return BACKWARD, self.dtype

    def _decision(self, facts: OpFacts, region: Region) -> tuple[Decision, torch.dtype]:
        if not region.enabled:
            return AUTHOR_DISABLED, self.dtype
        if (replayed_meta() or {}).get(OPAQUE):
            return INSIDE, self.dtype
        if facts.site in self.planned:
            return self.planned[SiteId(facts.site)], self.dtype
        if self.twins.innermost is not None and self.rules.file.level == "calls":
            return INSIDE_TWIN, self.dtype
        rules, dtype = self.rules, self.dtype
        if region.dtype is not None:
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
            stored = self.facts.is_rounded(value) and not self.write_count(value)
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
        is_followed = torch.is_grad_enabled() and self.rules.file.level == "calls"
        if is_followed and self.facts.name_of(value) is None:
            result: torch.Tensor = cast(value, to)
            return result
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
            dtypes = {tensor.dtype for tensor in called.tensors if _castable(tensor)}
            if kind is Cast.WIDEST:
                return torch.float32 if torch.float32 in dtypes else None
            return dtype if dtypes - {torch.float32} else None
        assert kind not in COLORS, "colors are resolved before anything is cast"
        return None


def _castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in CASTABLE_DTYPES


@dataclass(eq=False)
class FactFinder:
    """Extracts ``OpFacts`` from the calls of one trace.

    ``rounded`` are names of parameters and buffers whose values are rounded to 16 bits.
    """

    model: nn.Module
    dtype: str
    measured: Mapping[SiteId, Measurement]
    rounded: frozenset[str]

    def __post_init__(self) -> None:
        self._modules = {layer_path(name): module for name, module in self.model.named_modules()}
        self._names: dict[int, str] | None = None

    def of(self, called: OpCalled, layer: str, kind: str, site: SiteId) -> OpFacts:
        """Return the facts about a call in a layer whose class is named ``kind``."""
        arguments, module = called.named, self._modules.get(layer)
        names = map(self.name_of, called.tensors)
        return OpFacts(
            op=op_name(called.op),
            layer=layer,
            dtype=self.dtype,
            site=site,
            classes=(kind,)
            if module is None or isinstance(module, torch.fx.GraphModule)
            else class_names(type(module)),
            module=module,
            parameters=tuple(name for name in names if name is not None),
            arguments={
                name: dtype_name(value) if isinstance(value, torch.dtype) else value
                for name, value in arguments.items()
                if _is_plain(value)
            },
            depth=reduction_depth(called.op, arguments),
            measurement=self.measured.get(site),
        )

    def is_rounded(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer whose values are rounded to 16 bits."""
        return bool(self.rounded) and self.name_of(tensor) in self.rounded

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a parameter or buffer; ``None`` for other tensors."""
        if self._names is None:
            # the tracer has put its own tensors into the modules by now
            self._names = {id(t): layer_path(name) for name, t in named_tensors(self.model).items()}
        return self._names.get(id(tensor))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


Arguments = Mapping[str, Any]


def reduction_depth(op: OpOverload, arguments: Arguments) -> int | None:
    """Count the terms that an op sums for one output element; ``None`` if it sums none.

    Reduced axes count as their product: the mean of a 512 x 512 image has depth 262144. A convolution's is
    its fan-in, in_channels / groups times the kernel's volume; attention's the longer of its two sums.
    """
    rule = _RULES.get(base_name(op))
    if rule is None or sizes_vary(arguments):
        return None
    try:
        return rule(arguments)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None  # an unusual form of the op, such as nested tensors


def _size(name: str, axis: int) -> Callable[[Arguments], int]:
    return lambda arguments: int(arguments[name].shape[axis])


def _reduced(arguments: Arguments) -> int:
    value: torch.Tensor = arguments.get("self", arguments.get("input"))
    axes = arguments.get("dim")
    if axes is None or axes == []:
        return value.numel()
    dims = axes if isinstance(axes, Sequence) else [axes]
    return math.prod(int(value.shape[axis]) for axis in dims)


def _convolution(arguments: Arguments) -> int:
    if arguments.get("transposed"):
        return _transposed_convolution(arguments)
    return int(math.prod(arguments["weight"].shape[1:]))


def _transposed_convolution(arguments: Arguments) -> int:
    weight = arguments["weight"].shape
    return int(math.prod(weight)) // int(weight[1]) // int(arguments.get("groups", 1))


def _attention(arguments: Arguments) -> int:
    return max(int(arguments["query"].shape[-1]), int(arguments["key"].shape[-2]))


def _einsum(arguments: Arguments) -> int:
    terms, _, result = arguments["equation"].replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for letters, tensor in zip(terms.split(","), arguments["tensors"], strict=True):
        if "." in letters:
            raise KeyError("an ellipsis")
        sizes |= dict(zip(letters, (int(n) for n in tensor.shape), strict=True))
    output_letters = result or "".join(c for c in sizes if terms.count(c) == 1)
    return math.prod(size for letter, size in sizes.items() if letter not in output_letters)


def _group(arguments: Arguments) -> int:
    value = arguments["input"]
    return int(value.numel() // value.shape[0] // arguments["num_groups"])


def _pool(arguments: Arguments) -> int:
    kernel = arguments["kernel_size"]
    dims = len(arguments["self"].shape) - 2
    return math.prod(kernel) if len(kernel) > 1 else int(kernel[0]) ** dims


def _adaptive(arguments: Arguments) -> int:
    value, target = arguments["self"], arguments["output_size"]
    pairs = zip(value.shape[-len(target) :], target, strict=True)
    return math.prod(-(-int(size) // int(out)) for size, out in pairs)


_RULES: dict[str, Callable[[Arguments], int]] = {
    "linear": _size("input", -1),
    "addmm": _size("mat1", -1),
    "addmv": _size("mat", -1),
    "baddbmm": _size("batch1", -1),
    "addbmm": lambda named: int(named["batch1"].shape[0] * named["batch1"].shape[-1]),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "group_norm": _group,
    **dict.fromkeys("mm mv matmul bmm dot vdot".split(), _size("self", -1)),
    **dict.fromkeys("conv1d conv2d conv3d convolution _convolution".split(), _convolution),
    **dict.fromkeys("conv_transpose1d conv_transpose2d conv_transpose3d".split(), _transposed_convolution),
    **dict.fromkeys("sum nansum mean prod var std var_mean std_mean logsumexp norm".split(), _reduced),
    **dict.fromkeys("linalg_vector_norm softmax log_softmax _softmax _log_softmax".split(), _reduced),
    **dict.fromkeys("cumsum cumprod".split(), _reduced),
    **dict.fromkeys(
        "layer_norm rms_norm native_layer_norm".split(),
        lambda named: int(math.prod(named["normalized_shape"])),
    ),
    **dict.fromkeys("avg_pool1d avg_pool2d avg_pool3d".split(), _pool),
    **dict.fromkeys("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d".split(), _adaptive),
}


@dataclass(frozen=True, slots=True)
class Region:
    """The innermost autocast region of the model's code around an op; no dtype where the policy decides."""

    enabled: bool = True
    dtype: torch.dtype | None = None


@contextmanager
def autocast_visible(enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Set the autocast flags that Python code can read while active, for every device type."""
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    cache = torch.is_autocast_cache_enabled()
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(False)
        with patched(_AVAILABLE):
            yield
    finally:
        for device, was_enabled, was_dtype in before:
            torch.set_autocast_enabled(device, was_enabled)
            torch.set_autocast_dtype(device, was_dtype)
        torch.set_autocast_cache_enabled(cache)


@contextmanager
def mixed_recurrent_inputs() -> Iterator[None]:
    """Let recurrent layers take 16-bit inputs while the code sees float32 weights, as under autocast."""
    original = RNNBase.check_input

    def check_input(self: RNNBase, input: Any, batch_sizes: Any) -> None:
        first: Any = self._flat_weights[0]
        alike: Any = SimpleNamespace(dtype=first.dtype, dim=input.dim, size=input.size)
        original(self, alike, batch_sizes)

    with patched([Replacement(RNNBase, "check_input", check_input)]):
        yield
