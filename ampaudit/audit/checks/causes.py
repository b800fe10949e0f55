"""Origins of inf and NaN, each with the most specific cause that applies.

The first cause that applies is reported. If none does, the finding is AMP101 (a value left the range) or
AMP103 (an input left the op's domain).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from ampaudit.audit.checks.interface import SCALE_INPUT, Cause, Check, CheckContext, cause, finding_at
from ampaudit.audit.checks.model_code import names_dtype
from ampaudit.audit.checks.precision import (
    cancellation,
    epsilon,
    log_sigmoid,
    log_softmax,
    positions,
    rounded_number,
)
from ampaudit.core.formats import BFLOAT16
from ampaudit.core.ops import having
from ampaudit.core.text import format_number
from ampaudit.findings.finding import Finding, Severity
from ampaudit.policy.schema import Cast
from ampaudit.run.record import Origin
from ampaudit.trace import Role, Site

_PRODUCTS = having("product", "added_product")
_ATTENTION_SOFTMAX = having("softmax") | {"exp"}
_FILLS = having("constant", "fills", "sum_of_two")
_DOMAINS = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "pow"), "negative"),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), "not between -1 and 1"),
    "acosh": "below 1",
    "log1p": "below -1",
    "logit": "not between 0 and 1",
}
_MASKED_ROW_SOFTMAX = having("softmax") | {"scaled_dot_product_attention"}
LONG = 64
_DEPTH = 8  # factors that are looked through
# what an op does, what the limit is, and what a sum adds up
_WORDS = {
    2.0: ("squares its input", "squared", "squares"),
    3.0: ("cubes its input", "cubed", "cubes"),
}
_PAIRS = {"sub": "inf - inf", "add": "inf - inf", "mul": "0 * inf", "matmul": "0 * inf", "bmm": "0 * inf"}


@cause("AMP108", "scale q before the product (q * d**-0.5) @ k^T, or use scaled_dot_product_attention")
def attention(context: CheckContext, site: Site) -> str | None:
    """Explain a product of two activations that is followed by a softmax."""
    flow = context.flow
    if flow.base(site) not in _PRODUCTS or any(flow.is_weight(n) for n in flow.node(site).all_input_nodes):
        return None
    softmax = flow.leads_to(site, *_ATTENTION_SOFTMAX, within=6)
    if softmax is None:
        return None
    scaled = flow.leads_to(site, "div", "mul", within=2)
    if scaled is not None:
        return f"these scores are scaled only afterwards, at {scaled.id}"
    return f"these scores go unscaled into {softmax.id}"


@cause("AMP117", "keep the buffer, and the op that writes it, in float32")
def buffers(context: CheckContext, site: Site) -> str | None:
    """Explain a value that a buffer keeps for later calls and the checkpoint."""
    buffer = context.origins[site.id].buffer
    return None if buffer is None else f"buffer {buffer!r} keeps the value after the call"


@cause("AMP101", "")
def inputs(context: CheckContext, site: Site) -> str | None:
    """Explain an op that reads an input of the model which the format cannot hold."""
    beyond = context.origins[site.id].input
    if beyond is None:
        return None
    name, peak = beyond
    return f"{name} reaches {format_number(peak)}, which is infinite in {context.number_format.name}"


@cause(
    "AMP301",
    "for a mask or a limit, write torch.finfo(x.dtype).min (or .max) of the tensor that it is used with; "
    "compute with any other constant in float32",
)
def constant(context: CheckContext, site: Site) -> str | None:
    """Explain a call with an out-of-range Python number, or a value that depends on constants only."""
    large = [v for v in context.numbers(site) if context.number_format.max < abs(v) < math.inf]
    if large and context.flow.base(site) in _FILLS:
        return f"the constant {format_number(large[0])} is in the call"
    return "the value is made of constants" if site.id in context.constants else None


@cause("AMP115", "clamp the input to the domain, with a margin of the format's eps, or use float32 here")
def domain(context: CheckContext, site: Site) -> str | None:
    """Explain an op that returns NaN outside its domain, or infinity at its boundary."""
    base, stats = context.flow.base(site), context.observed(site.id)
    if base not in _DOMAINS:
        return None
    if stats.nan:
        return f"{base} is not defined where its input is {_DOMAINS[base]}, and rounding takes it there"
    if base in ("atanh", "erfinv", "log1p", "logit"):
        return f"{base} is infinite at the end of its domain, and rounding takes its input there"
    return None


@cause(
    "AMP107",
    "use F.softplus, torch.logsumexp or F.softmax, which stay in range; or subtract the maximum first",
)
def exponential(context: CheckContext, site: Site) -> str | None:
    """Explain an exponential, or a sum of exponentials."""
    limit = math.log(context.number_format.max)
    base = context.flow.base(site)
    if _is_exponential(context, site):
        return f"{base} grows faster than any format; exp(x) overflows from x = {limit:.4g}"
    producers = context.flow.producers(site)
    if base in ("sum", "add", "mul", "cumsum") and any(
        _is_exponential(context, producer) for producer in producers
    ):
        return f"these are exponentials written out; exp(x) overflows from x = {limit:.4g}"
    return None


def _is_exponential(context: CheckContext, site: Site) -> bool:
    """Return whether the exponent of a site is computed: a constant one makes a power, or a quotient."""
    exponent = context.flow.arguments(site).get("exponent")
    return context.flow.base(site) in having("exponential") and not isinstance(exponent, int | float)


@cause("AMP201", "scale the value up before it is rounded, add an eps that the format holds, or use float32")
def flushed(context: CheckContext, site: Site) -> str | None:
    """Explain an op that is infinite at zero."""
    if context.flow.base(site) not in having("infinite_at_zero"):
        return None
    form = context.number_format
    least = format_number(form.flush_below)
    return f"an input that is not zero in FP32 is flushed to 0: {form.name} holds nothing below {least}"


@cause("AMP113", "fill with torch.finfo(scores.dtype).min, or leave one element of every row unmasked")
def masked_row(context: CheckContext, site: Site) -> str | None:
    """Explain a softmax that is NaN because -inf masks a whole row."""
    stats = context.observed(site.id)
    if context.flow.base(site) in _MASKED_ROW_SOFTMAX and stats.nan:
        return "a row of this softmax holds nothing but -inf"
    masks = site.id in context.by_design or context.flow.base(site) in having("fills")
    if not masks or not stats.neg_inf or stats.pos_inf:
        return None
    for poisoned in context.origins[site.id].poisons:
        if context.flow.base(context.site[poisoned]) in _MASKED_ROW_SOFTMAX:
            return f"-inf masks a whole row, which is NaN at {poisoned}"
    return None


@cause(
    "AMP105", "compute it in float32 (x.sum(dtype=torch.float32)), take the mean, or scale the terms first"
)
def reduction(context: CheckContext, site: Site) -> str | None:
    """Explain a reduction; products of two activations count if the reduced axis is long."""
    flow, depth = context.flow, site.facts.depth if site.facts is not None else None
    terms = f" of {depth} terms" if depth else ""
    if flow.base(site) in having("factors"):
        return f"the product of {depth or 'the'} factors is too large, not its factors"
    if flow.base(site) in having("total"):
        return f"the total{terms} is too large, not its terms"
    activations = not any(flow.is_weight(node) for node in flow.node(site).all_input_nodes)
    if flow.base(site) in _PRODUCTS and activations and depth is not None and depth >= LONG:
        return f"the op adds up products of two activations: {depth} terms"
    return None


@cause("AMP109", "keep the residual stream in float32 (the adds alone cost little), or use bfloat16")
def residual(context: CheckContext, site: Site) -> str | None:
    """Explain an add to a value that is itself the result of such an add."""
    flow = context.flow
    nodes = flow.node(site).all_input_nodes
    if flow.base(site) != "add" or len(nodes) != 2 or any(flow.is_weight(node) for node in nodes):
        return None
    stream = next((flow.produced_by(node, "add") for node in nodes if flow.produced_by(node, "add")), None)
    if stream is None or context.observed(stream.id).bad:
        return None
    peak = format_number(context.observed(stream.id).ref_peak)
    return f"the stream comes with {peak} from {stream.id} and grows here"


@cause("AMP106", "square in float32 (x.float().square()), or divide x by its peak before squaring")
def squares(context: CheckContext, site: Site) -> str | None:
    """Explain an op that raises its input to a power, or adds up powers."""
    power = _power(context, site)
    if power is not None:
        limit = f"{context.number_format.max ** (1 / power):.4g}"
        other = (f"raises its input to the power {power:g}", f"to the power {power:g}", "")
        does, raised, _ = _WORDS.get(power, other)
        return f"the op {does}, and {limit} {raised} is the limit"
    if context.flow.base(site) not in having("sum"):
        return None
    powers = [_power(context, producer) for producer in context.flow.producers(site)]
    summed = next((power for power in powers if power is not None), None)
    if summed is None:
        return None
    return f"the op adds up {_WORDS[summed][2] if summed in _WORDS else f'values to the power {summed:g}'}"


def _power(context: CheckContext, site: Site) -> float | None:
    """Return the power that a site computes, if above 1; ``None`` otherwise."""
    flow = context.flow
    if site.role.converts:  # what it converts was computed before
        return None
    if flow.base(site) in having("squares"):
        return 2.0
    if flow.base(site) in having("product"):
        operands = _operands(flow.arguments(site))
        same = len(operands) == 2 and flow.root(operands[0]) is flow.root(operands[1]) is not None
        return 2.0 if same else None
    power = _as_power(context, flow.node(site), _DEPTH)[1]
    return power if power > 1 else None


def _as_power(context: CheckContext, node: Any, depth: int) -> tuple[fx.Node | None, float]:
    """Return a value as base and exponent: ``x * x * x`` is x to the third."""
    flow = context.flow
    root, site = flow.root(node), flow.producer(node)
    if site is None or depth == 0:
        return root, 1.0
    arguments = flow.arguments(site)
    exponent = {"square": 2, "pow": arguments.get("exponent")}.get(flow.base(site))
    if isinstance(exponent, int | float) and exponent >= 1:
        base, power = _as_power(context, arguments["self"], depth - 1)
        return base, exponent * power
    if flow.base(site) == "mul":
        (base, power), (other, times) = (_as_power(context, o, depth - 1) for o in _operands(arguments))
        if base is other is not None:
            return base, power + times
    return root, 1.0


def _operands(arguments: dict[str, Any]) -> list[Any]:
    tensors = arguments.get("tensors")
    return list(tensors) if isinstance(tensors, list | tuple) else list(arguments.values())[:2]


@cause("AMP114", "look for a sentinel or mask among the inputs; use a finite one")
def undefined(context: CheckContext, site: Site) -> str | None:
    """Explain an op that returns NaN although it is defined for every pair of finite numbers."""
    base = context.flow.base(site)
    return f"{_PAIRS[base]} in 16 bits" if base in _PAIRS and context.observed(site.id).nan else None


def find_origins(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per origin that no weight explains."""
    for origin in context.record.origins:
        site = context.site[origin.site]
        if context.from_weight(site):
            continue
        overflow = context.is_overflow(origin)
        reasons = ((c, c.applies(context, site)) for c in (OVERFLOW_CAUSES if overflow else DOMAIN_CAUSES))
        match, reason = next(((c, r) for c, r in reasons if r is not None), (None, None))
        code = match.code if match else ("AMP101" if overflow else "AMP103")
        advice = (match and match.advice) or _advice(context, site)
        number = rounded_number(context, site)
        if number is not None and number.site.dtype is None:  # it compares, since its result is no float
            advice = f"compute what {number.site.id} compares in float32, where the number is not rounded"
        text = _overflow_text(context, site) if overflow else _domain_text(context, site)
        parts = (number and number.text, reason, text, _fate_text(context, origin))
        severity = Severity.ERROR if context.harms(origin) else Severity.NOTE
        finding = finding_at(context, site, code, "; ".join(filter(None, parts)), advice, severity=severity)
        yield replace(
            finding,
            evidence=replace(finding.evidence, step=context.step_of(origin.batch)),
            origin=True,
            batch=context.record.names.get(origin.batch),
            poisons=origin.poisons,
            fate=origin.fate,
            hidden_at=origin.hidden_at,
        )


def _fate_text(context: CheckContext, origin: Origin) -> str:
    """Describe the op that makes the value finite again, which need not be correct."""
    if origin.fate != "recovered":
        return ""
    where = origin.hidden_at[0]
    if not context.harms(origin):
        return f"{where} makes it finite again, with the right values"
    if not origin.harms:
        return f"{where} makes it finite again, which the FP32 model does not run: no NaN shows it"
    return (
        f"{where} makes it finite again, and wrong ({origin.hidden_sqnr_db or 0.0:.0f} dB against FP32): "
        "no NaN shows it"
    )


def _overflow_text(context: CheckContext, site: Site) -> str:
    form, stats = context.number_format, context.observed(site.id)
    what = (
        f"in FP32 the values reach {format_number(stats.ref_peak)}; "
        f"{form.name} ends at {format_number(form.max)}"
    )
    if site.role is Role.INSERTED_CAST:
        return f"{what}, and the policy casts this input to {form.name}"
    if site.decision.rule is None:
        return f"{what}, and no rule of the policy keeps this op in float32"
    if site.decision.cast is Cast.FLOAT32:
        return f"{what}, and rule {site.decision.rule} casts the op's inputs to float32 but not its result"
    return f"{what}; rule {site.decision.rule} runs this op in {form.name}"


def _domain_text(context: CheckContext, site: Site) -> str:
    stats = context.observed(site.id)
    became = "NaN" if stats.nan else "infinite"
    peak = stats.bad_ref_peak
    values = f"values up to {format_number(peak)} in FP32" if peak else "values that are 0 in FP32"
    return f"{values} became {became} in {context.number_format.name}"


def _advice(context: CheckContext, site: Site) -> str:
    where = f"layer {site.layer!r}" if site.layer else "this op"
    change = f"try a rule that keeps {where} in float32"
    peak, form = context.observed(site.id).ref_peak, context.number_format
    beyond = context.origins[site.id].input
    if beyond is not None:
        change, peak = SCALE_INPUT, max(peak, beyond[1])
    fits = form != BFLOAT16 and peak <= BFLOAT16.max and not names_dtype(site)
    other = ", or use --dtype bfloat16 (range of float32)" if fits else ""
    return f"{change}{other}"


OVERFLOW_CAUSES: tuple[Cause, ...] = (
    buffers,
    masked_row,
    inputs,
    positions,
    constant,
    attention,
    squares,
    epsilon,
    exponential,
    reduction,
    residual,
)
DOMAIN_CAUSES: tuple[Cause, ...] = (
    buffers,
    masked_row,
    inputs,
    log_sigmoid,
    log_softmax,
    epsilon,
    cancellation,
    domain,
    flushed,
    undefined,
)
CHECKS = (Check("AMP101", find_origins),)
