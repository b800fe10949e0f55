"""Rescales a stream of values by 2^-k, where the graph proves that the model computes the same function.

All weights that write to the stream are multiplied by 2^-k, and the eps of each norm that reads it by 2^-2k:
then norms return the same bits. A weight that is also the head's is compensated in the last norm.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ampaudit.audit.advice.interface import AdviceContext, Proposal
from ampaudit.audit.advice.residual_stream import AttributeChange, Refusal, Stream, find_stream
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number, plural, ratio_db
from ampaudit.findings.finding import Finding
from ampaudit.trace import Site, TracedModel
from ampaudit.trace.converted import identity
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.flow import Flow
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Slot
from ampaudit.trace.isolation import structural_copy
from ampaudit.trace.opnames import CAST_OPS, base_name, named_arguments
from ampaudit.trace.values import dtype_name, torch_dtype

SPARE_BITS = 2
_LOSS_DB = 1.0  # that 16 bits may cost the weights, because some become subnormal
_EXACT_DB = 80.0


@dataclass(frozen=True, slots=True)
class ResidualRescale:
    """A change of weights and eps that makes a stream of values 2^-bits times as large."""

    bits: int  # bits by which the stream shrinks
    weights: Mapping[str, int]  # exponent of the power of two to multiply each weight by, by name
    attributes: tuple[AttributeChange, ...]  # number attributes of modules that change as well
    stream: Stream  # the proved stream
    loss_db: float  # accuracy in dB that the 16-bit copies of the weights lose

    @property
    def change(self) -> str:
        """The change in one line."""
        down = sum(power < 0 for power in self.weights.values())
        up = len(self.weights) - down
        parts = [f"{plural(down, 'weight')} that write to the stream by 2^-{self.bits}"]
        if up:
            parts.append(f"{plural(up, 'weight')} of the last norm by 2^{self.bits}")
        if self.attributes:
            parts.append(f"the eps of {plural(len(self.attributes), 'norm')} by 2^-{2 * self.bits}")
        cost = f"; the weights lose {self.loss_db:.1f} dB in 16 bits" if self.loss_db >= 0.1 else ""
        return f"multiply {', '.join(parts)}: the same function{cost}"

    @property
    def paste(self) -> str:
        """The change as Python code for a variable ``model``."""
        lines = [
            "with torch.no_grad():",
            "    weights = dict(model.named_parameters(remove_duplicate=False))",
            "    weights |= dict(model.named_buffers(remove_duplicate=False))",
        ]
        for power in sorted(set(self.weights.values())):
            lines += _loop([name for name, exponent in self.weights.items() if exponent == power], "    ")
            lines.append(f"        weights[name].mul_(2.0**{power})")
        for name, new in dict.fromkeys((each.name, each.new) for each in self.attributes):
            lines += _loop([each.module for each in self.attributes if (each.name, each.new) == (name, new)])
            lines.append(f"    model.get_submodule(name).{name} = {new!r}")
        return "\n".join(lines)

    def applied(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model with the change."""
        changed = structural_copy(model)
        tensors = named_tensors(changed)
        with torch.no_grad():
            for name, power in self.weights.items():
                tensors[name].mul_(2.0**power)
        for each in self.attributes:
            setattr(changed.get_submodule(each.module), each.name, each.new)
        return changed

    def is_in(self, before: Flow, after: Flow) -> bool:
        """Return whether the changed model's graph differs in exactly the numbers that should change.

        This detects attributes that are read elsewhere as well, or not at all. Casts may differ.
        """
        powers = {key: -self.bits * degree for key, degree in self.stream.numbers.items()}
        return [_shape(each, powers) for each in before.traces] == [_shape(each, {}) for each in after.traces]


def _loop(names: list[str], indent: str = "") -> list[str]:
    """Return the head of a loop over names, wrapped to the line length."""
    quoted = ", ".join(map(json.dumps, names)) + ","
    wrapped = textwrap.wrap(quoted, 92 - len(indent), break_long_words=False, break_on_hyphens=False)
    return [f"{indent}for name in [", *(f"{indent}    {line}" for line in wrapped), f"{indent}]:"]


def stream_rescaled(subject: AdviceContext, finding: Finding) -> Iterator[Proposal]:
    """Propose to rescale the stream that a finding's value is on."""
    context = subject.context
    site = context.site.get(finding.site)
    if site is None or site not in context.graph_sites:
        return
    peaks = {each.id: context.observed(each.id).ref_peak for each in context.graph_sites}
    try:
        change = residual_rescale(subject.model, context.flow, site, peaks, context.number_format)
    except Refusal:
        return
    yield Proposal(
        "rescale",
        change.change,
        change.paste,
        model=change.applied(subject.model),
        confirmed=lambda after: change.is_in(context.flow, after),
    )


def residual_rescale(
    model: nn.Module,
    flow: Flow,
    site: Site,
    peaks: Mapping[SiteId, float],
    form: NumberFormat,
    promoted: Collection[SiteId] = (),
) -> ResidualRescale:
    """Find the smallest power of two that keeps the stream of a site's value within the format.

    ``peaks`` holds the largest FP32 magnitude at each site, and ``promoted`` the sites in float32 that will
    be in 16 bits afterwards. The model is not changed.

    Raises:
        Refusal: The stream cannot be rescaled, or need not be.
    """
    stream = find_stream(flow, site, form.max)
    site_peaks = [
        (each, peaks.get(each.id, 0.0), degree)
        for node, degree in stream.degrees.items()
        if (each := flow.site(node)) is not None and (each.dtype == torch_dtype(form) or each.id in promoted)
    ]
    bits = _bits(named_tensors(model), stream, site_peaks, form)
    attributes = _attributes(model, flow, stream, bits)
    weights = {name: -bits * degree for name, degree in stream.weights.items()}
    return ResidualRescale(bits, weights, attributes, stream, _loss(model, weights, form))


def _bits(
    tensors: Mapping[str, torch.Tensor],
    stream: Stream,
    site_peaks: Sequence[tuple[Site, float, int]],
    form: NumberFormat,
) -> int:
    """Return the power of two for sites with these peaks and degrees."""
    over = [(math.log2(peak / form.max), d) for _, peak, d in site_peaks if d > 0 and 0.0 < peak < math.inf]
    if not over or max(excess for excess, _ in over) < -1.0:
        raise Refusal("the stream stays within half of the format")
    bits = max(math.ceil((excess + SPARE_BITS) / degree) for excess, degree in over)
    for name, degree in stream.weights.items():
        largest = float(tensors[name].detach().abs().amax()) if name in tensors else 0.0
        if degree > 0 and largest > 0.0:
            bits = max(bits, math.ceil(math.log2(largest / form.max) / degree))
    for site, peak, degree in site_peaks:
        grown = math.ldexp(peak, -bits * degree)
        if degree < 0 and grown > form.max / 2:
            raise Refusal(f"{site.id}, which makes up for it, would reach {format_number(grown)}")
    return bits


def _attributes(model: nn.Module, flow: Flow, stream: Stream, bits: int) -> tuple[AttributeChange, ...]:
    """Return the module attributes behind the numbers that change in the graph."""
    changes: dict[tuple[str, str], AttributeChange] = {}
    for (node, argument), degree in stream.numbers.items():
        site, old = flow.site(node), _number(node, argument)
        if not old or site is None:
            continue
        try:
            module = model.get_submodule(site.layer)
        except AttributeError:
            module = nn.Module()
        name = _attribute(module, old)
        if name is None:
            raise Refusal(f"{argument}={old:.3g} of {site.id} is not an attribute of its layer")
        change = AttributeChange(site.layer, name, old, math.ldexp(old, -bits * degree))
        if changes.setdefault((site.layer, name), change) != change:
            raise Refusal(f"{site.layer}.{name} would have to scale in two ways")
    return tuple(changes.values())


def _number(node: fx.Node, argument: str) -> float:
    op = overload_of(node.target)
    assert op is not None
    default = next((a.default_value for a in op._schema.arguments if a.name == argument), None)
    value = named_arguments(op, node.args, dict(node.kwargs)).get(argument, default)
    return torch.finfo(torch.float32).eps if value is None else float(value)


def _attribute(module: nn.Module, value: float) -> str | None:
    """Return the name of the only attribute with a value; an eps of ``None`` is float32's."""
    unset = torch.finfo(torch.float32).eps
    values = {name: unset if number is None else number for name, number in vars(module).items()}
    equal = (name for name, number in values.items() if isinstance(number, float) and number == value)
    names = [name for name in equal if name.isidentifier()]
    eps_names = [name for name in names if "eps" in name.lower()] or names
    return eps_names[0] if len(eps_names) == 1 else None


def _loss(model: nn.Module, weights: Mapping[str, int], form: NumberFormat) -> float:
    """Return the accuracy in dB that 16-bit copies of the weights lose; refuse if scaling is not exact."""
    tensors, worst = named_tensors(model), 0.0
    for name, power in weights.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.data_ptr() == 0:
            raise Refusal(f"{name} is not a weight that is held in memory")
        if _overlaps(tensor, tensors.values()):
            raise Refusal(f"{name} shares memory with another weight")
        tensor = tensor.detach()
        scaled = tensor * 2.0**power
        if not torch.equal(scaled * 2.0**-power, tensor):
            raise Refusal(f"{name} times 2^{power} is subnormal in {dtype_name(tensor.dtype)}")
        before, after = (_decibels(each, torch_dtype(form)) for each in (tensor, scaled))
        if before - after > _LOSS_DB:
            what = f"{before:.0f} dB become {after:.0f}"
            raise Refusal(f"{name} times 2^{power} is subnormal in {form.name}: {what}")
        worst = max(worst, before - after)
    return worst


def _decibels(tensor: torch.Tensor, dtype: torch.dtype) -> float:
    error = (tensor.to(dtype).to(tensor.dtype) - tensor).double().square().sum()
    return min(ratio_db(float(tensor.double().square().sum()), float(error)), _EXACT_DB)


def _overlaps(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Return whether a tensor shares memory with a different tensor, or is not contiguous."""

    def ends(each: torch.Tensor) -> tuple[int, int]:
        return each.data_ptr(), each.data_ptr() + each.numel() * each.element_size()

    low, high = ends(tensor)
    near = (each for each in others if ends(each)[0] < high and low < ends(each)[1])
    return not tensor.is_contiguous() or any(identity(each) != identity(tensor) for each in near)


def _shape(traced: TracedModel, powers: Mapping[tuple[fx.Node, str], int]) -> list[Any]:
    """Return the ops of a graph, without casts, with their numbers scaled, and its constants."""
    ops: list[Any] = []
    for node in traced.graph.nodes:
        op = overload_of(node.target)
        if op is None or base_name(op) in CAST_OPS:
            continue
        arguments = named_arguments(op, node.args, dict(node.kwargs))
        for name in {each for key, each in powers if key is node}:
            arguments[name] = math.ldexp(_number(node, name), powers[node, name])
        ops.append((str(op), sorted((key, _plain(value)) for key, value in arguments.items())))
    constants = [traced.tensors[p.node] for p in traced.placeholders if p.slot is Slot.CONSTANT]
    return [*ops, *(tensor.tolist() for tensor in constants)]


def _plain(value: Any) -> str:
    """Return an argument as text, without the names of nodes."""
    if isinstance(value, fx.Node):
        return "value"
    return str([_plain(item) for item in value]) if isinstance(value, list | tuple) else repr(value)
