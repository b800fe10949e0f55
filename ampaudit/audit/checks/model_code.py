"""What the model's code does about precision: casts of its own, branches, values that leave torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from ampaudit.audit.checks.interface import (
    Check,
    CheckContext,
    finding_about,
    finding_at,
    source_of,
)
from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import plural, signal_to_noise_db
from ampaudit.findings.finding import OTHER_CODE, Finding, Severity
from ampaudit.policy.schema import Cast
from ampaudit.run.record import OutputDifference, ReadStats
from ampaudit.trace import Role, Site
from ampaudit.trace.caster import MIXED_DTYPES, TOO_LARGE
from ampaudit.trace.converted import CodeDifference
from ampaudit.trace.flow import Flow
from ampaudit.trace.graph import Slot
from ampaudit.trace.opnames import mutated_arguments
from ampaudit.trace.path.reads import ReadKind
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name, node_dtype

_ADVICE = (
    "make the dtypes agree, as with x.to(self.weight.dtype) or torch.zeros(..., dtype=x.dtype), "
    "or add a rule for the op: cast: widest"
)
_FILL = "fill with torch.finfo(x.dtype).min or with -inf, or call it on x.float()"
_CODE_UNKNOWN_ADVICE = "compare the outputs of the 16-bit model and of the FP32 model yourself"
_FLIPPED_BRANCH_ADVICE = (
    "compute what is decided on in float32, or decide with a margin that rounding does not cross"
)
_LEFT_TORCH_ADVICE = "compute with tensors, or judge by hand what this code makes of 16-bit values"
_WIDE = (torch.float32, None)  # None for several values
_NAMED_DTYPE = re.compile(r"\.(float|half|bfloat16)\(\)|torch\.(float16|bfloat16|float32|half|float)\b")
_CODE_DIFFERS_ADVICE = "write the line so that it does the same in every precision"


def find_code_differs(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding: the line where the code differs, and the output that suffers most."""
    code = context.record.code
    graded = [(severity, d) for d in code.outputs.values() if (severity := _severity(context, d)) is not None]
    if not graded:
        return
    severity, worst = min(graded, key=lambda item: (-item[0].rank, item[1].code_sqnr_db))
    more = f"; {len(graded) - 1} more of the outputs differ" if len(graded) > 1 else ""
    if code.place is not None:
        what = describe_difference(code.place, context.number_format.name)
    else:
        others = f" (first of {len(code.reads)} such lines)" if len(code.reads) > 1 else ""
        what = f"{_name(code.reads[0])} reads a precision{others}, and the FP32 model returns other values"
    cause = f"{what}: {_effect(worst)}{more}"
    finding = code_finding(context, code.place, OTHER_CODE, cause, _CODE_DIFFERS_ADVICE, severity, worst.name)
    if code.place is None and code.reads:
        finding = replace(finding, source=source_of(code.reads[0]))
    yield finding


def _severity(context: CheckContext, output: OutputDifference) -> Severity | None:
    """Return an error if the code spoils an output, a warning if it adds more error than rounding."""
    code, limit = context.record.code, context.config.min_sqnr
    mostly = 2 * output.code_err_sq >= output.err_sq
    if output.problem is not None or (output.sqnr_db < limit and (mostly or output.code_sqnr_db < limit)):
        return Severity.ERROR
    if output.agrees or code.place is None:
        return None  # FP32's own noise
    return Severity.WARNING if mostly else Severity.NOTE


def _effect(output: OutputDifference) -> str:
    if output.problem is not None:
        return f"{output.name} {output.problem}"
    if output.integers:
        return f"{output.name} differs from FP32 in {output.err_sq:,.0f} of {output.ref_sq:,.0f} integers"
    if not math.isfinite(output.code_sqnr_db):
        return f"{output.name} has nothing in common with FP32"
    total = f"has {output.sqnr_db:.0f} dB against FP32"
    if not math.isfinite(output.sqnr_db):
        total = "is exact" if output.sqnr_db > 0 else "is inf or NaN"
    return f"{output.name} {total}, {output.code_sqnr_db:.0f} dB from this difference alone"


def describe_difference(difference: CodeDifference, dtype: str) -> str:
    """Describe what a line does in 16 bits and in FP32."""
    line, layer = difference.source, difference.layer
    where = _name(line) if line is not None else f"layer {layer or '(top)'}"
    does = f"runs {difference.low} in {dtype} and {difference.fp32 or 'nothing'} in FP32"
    if difference.low is None:
        does = f"runs {difference.fp32} in FP32 and nothing in {dtype}"
    others = f" (first of {difference.lines} such places)" if difference.lines > 1 else ""
    return f"{where} {does}{others}"


def code_finding(
    context: CheckContext,
    place: CodeDifference | None,
    code: str,
    cause: str,
    advice: str,
    severity: Severity,
    output: str,
) -> Finding:
    """Return a finding at the op where the code differs, or else at the output."""
    if place is None:
        site = context.output_site(output)
    else:
        site = context.site.get(place.site) if place.low is not None else None
    if site is not None:
        return finding_at(context, site, code, cause, advice, severity=severity)
    if place is None:
        return finding_about(code, SiteId("(top)/output"), "", cause, advice, severity=severity)
    about = finding_about(code, place.site, place.layer, cause, advice, severity=severity)
    return replace(about, phase="forward", source=source_of(place.source, place.caller))


def _name(line: SourceLine) -> str:
    return f"{Path(line.file).name}:{line.line}"


def find_code_unknown(context: CheckContext) -> Iterator[Finding]:
    """Yield a warning if the traces differ, otherwise a note."""
    code = context.record.code
    if code.failure is None or code.outputs:
        return
    place = code.place
    severity = Severity.NOTE if place is None and not code.untraced else Severity.WARNING
    alike = "it could not be traced either" if code.untraced else "its trace does not differ"
    if place is not None:
        alike = describe_difference(place, context.number_format.name)
    cause = f"the FP32 model could not be run eagerly ({code.failure}); {alike}"
    first = context.flow.traced.outputs[0] if context.flow.traced.outputs else ""
    yield code_finding(context, place, "AMP213", cause, _CODE_UNKNOWN_ADVICE, severity, first)


def find_flipped_branch(context: CheckContext) -> Iterator[Finding]:
    """Yield a warning per line, and an error if an overflow is the reason."""
    dtype = context.number_format.name
    for stats in context.record.path.reads.values():
        if not stats.differing:
            continue
        times = "" if stats.reads == 1 else f" {stats.differing} of {plural(stats.reads, 'time')}"
        verb = f"{stats.name} returns" if stats.sizes else "it reads"
        values = f"{verb} {stats.fp32} in FP32 and {stats.low} in {dtype}"
        why = "because of a value that overflows before; " if stats.faults else ""
        cause = f"this line decides differently in {dtype}{times}: {values}; {why}the audit follows FP32"
        severity = Severity.ERROR if stats.faults else None
        yield finding_at_read(context, stats, "AMP214", cause, _FLIPPED_BRANCH_ADVICE, severity)


def finding_at_read(
    context: CheckContext,
    stats: ReadStats,
    code: str,
    cause: str,
    advice: str,
    severity: Severity | None = None,
) -> Finding:
    """Return a finding at a line that reads values, with the measurements of the op that made them."""
    site = context.site.get(stats.place)
    if site is None:
        finding = finding_about(code, stats.place, stats.layer, cause, advice, severity=severity)
    else:
        finding = finding_at(context, site, code, cause, advice, severity=severity)
    source = source_of(stats.source, stats.caller)
    return replace(finding, phase="forward", layer=stats.layer, source=source or finding.source)


def find_left_torch(context: CheckContext) -> Iterator[Finding]:
    """Yield a note per line that takes an array of floats."""
    dtype = context.number_format.name
    for stats in context.record.path.reads.values():
        if stats.kind is not ReadKind.ARRAY:
            continue
        sqnr = signal_to_noise_db(stats.signal_sq, stats.error_sq)
        accuracy = "" if sqnr is None else f"; they have {sqnr:.0f} dB in {dtype}"
        cause = f"{stats.name}() hands values to code outside torch, which runs on FP32's{accuracy}"
        yield finding_at_read(context, stats, "AMP215", cause, _LEFT_TORCH_ADVICE)


def names_dtype(site: Site) -> bool:
    """Return whether the code casts to a dtype that it names."""
    return site.role is Role.CAST and site.source is not None and bool(_NAMED_DTYPE.search(site.source.code))


def find_hard_cast(context: CheckContext) -> Iterator[Finding]:
    """Find casts in the code to the other 16-bit format, or to float32 where the policy undoes them."""
    for site in context.graph_sites:
        if not names_dtype(site):
            continue
        other = site.dtype in LOW_PRECISION_DTYPES and not context.low_precision(site)
        if other and site.decision.reason != "author":
            name = dtype_name(site.dtype)
            cause = f"the code asks for {name}, and this run is in {context.number_format.name}"
            advice = "write x.to(y.dtype), where y is a tensor that x is combined with"
            yield finding_at(context, site, "AMP302", cause, advice)
        elif site.dtype is torch.float32 and (undone := _undone(context, site)) is not None:
            cause = f"the code asks for float32, and the policy casts the value down again for {undone.id}"
            advice = "switch autocast off for that line: with torch.autocast(device, enabled=False)"
            yield finding_at(context, site, "AMP302", cause, advice)


def _undone(context: CheckContext, site: Site) -> Site | None:
    """Return the op for which the policy casts an upcast value down, if that is its only use."""
    node = context.flow.node(site)
    users = [context.flow.site(user) for user in node.users]
    down = all(u and u.role is Role.INSERTED_CAST and u.dtype in LOW_PRECISION_DTYPES for u in users)
    if not users or not down or node_dtype(node.all_input_nodes[0]) not in LOW_PRECISION_DTYPES:
        return None
    return next(iter(context.flow.readers(site)), None)


def find_double(context: CheckContext) -> Iterator[Finding]:
    """Find the first float64 op of each layer that depends on the model's weights or input."""
    reported: set[str] = set()
    for site in context.graph_sites:
        if site.dtype is not torch.float64 or site.role is not Role.COMPUTE or site.layer in reported:
            continue
        if site.id not in context.constants and site.shape:
            reported.add(site.layer)
            cause = "this op computes in float64, which no cast of the policy touches"
            advice = "look for a Python or NumPy number that became a float64 tensor; give it dtype=x.dtype"
            yield finding_at(context, site, "AMP303", cause, advice, confidence="rule")


def find_probabilities(context: CheckContext) -> Iterator[Finding]:
    """Find ``binary_cross_entropy`` with 16-bit input, unless the policy forbids it anyway (AMP601)."""
    for site in context.graph_sites:
        if context.flow.base(site) != "binary_cross_entropy" or site.decision.cast is Cast.FORBID:
            continue
        producer = context.flow.producer(context.flow.node(site).all_input_nodes[0])
        if context.low_precision(site) or (producer is not None and context.low_precision(producer)):
            cause = f"a probability in {context.number_format.name} is 1 long before its logit is large"
            advice = "pass the logits to binary_cross_entropy_with_logits"
            yield finding_at(context, site, "AMP304", cause, advice, confidence="rule")


def find_in_place(context: CheckContext) -> Iterator[Finding]:
    """Find writes of float32 values into a tensor that the policy made 16-bit."""
    for site in context.graph_sites:
        if site.dtype not in LOW_PRECISION_DTYPES or context.flow.base(site) not in having("arithmetic"):
            continue
        node = context.flow.node(site)
        writes = isinstance(node.target, torch._ops.OpOverload) and mutated_arguments(node.target)
        others = node.all_input_nodes[1:] if writes else []
        wide = [n for n in others if node_dtype(n) is torch.float32]
        if wide:
            producer = context.flow.producer(wide[0])
            what = producer.id if producer else "a float32 tensor"
            cause = f"{what} is float32 and is rounded to {context.number_format.name} as it is written"
            advice = "write it out of place (x = x + y), which widens, if the precision is wanted"
            yield finding_at(context, site, "AMP305", cause, advice, confidence="rule")


def find_mixed_dtypes(context: CheckContext) -> Iterator[Finding]:
    """Find sites whose op raises about dtypes, by the trace's trials.

    A site that mixes dtypes only because an op before it did is left out: the same correction cures both.
    So is one whose dtypes the policy mixes: a converter, or a library, casts there.
    """
    by_policy = _refused_by_policy(context.flow)
    for site_id in first_refused(context.flow):
        if context.site[site_id].decision.reason == MIXED_DTYPES and site_id not in by_policy:
            yield _mixed_dtypes(context, site_id)


def mixed_after(before: CheckContext, after: CheckContext) -> tuple[Finding, ...]:
    """Return findings on all ops that raise about dtypes after a change of the policy.

    Unlike for ``find_mixed_dtypes``, only the policy before the change excuses them.
    """
    by_policy = _refused_by_policy(before.flow)
    return tuple(_mixed_dtypes(after, site) for site in first_refused(after.flow) if site not in by_policy)


def _mixed_dtypes(context: CheckContext, site_id: SiteId) -> Finding:
    site = context.site[site_id]
    cause = f"{site.decision.why.rstrip('.')}; the audit continued as if they were promoted"
    return finding_at(context, site, "AMP307", cause, _ADVICE, confidence="rule")


def find_mixed_numbers(context: CheckContext) -> Iterator[Finding]:
    """Find sites whose op raises about a number that the format does not hold."""
    for site in context.graph_sites:
        if site.decision.reason == TOO_LARGE:
            cause = f"{site.decision.why}; the audit continued in float32"
            yield finding_at(context, site, "AMP308", cause, _FILL, confidence="rule")


def first_refused(flow: Flow) -> tuple[SiteId, ...]:
    """Return the sites that are refused, without those that only follow from another."""
    first: dict[SiteId, None] = {}
    for traced in flow.traces:
        promoted: set[fx.Node] = set()
        for node in traced.graph.nodes:
            site = flow.site(node)
            follows = not promoted.isdisjoint(node.all_input_nodes)
            if _refused(site) or (follows and (site is None or site.role is not Role.CAST)):
                promoted.add(node)
            if site is not None and _refused(site) and not follows:
                first[site.id] = None
    return tuple(first)


def _refused(site: Site | None) -> bool:
    return site is not None and site.decision.reason in (MIXED_DTYPES, TOO_LARGE)


def _refused_by_policy(flow: Flow) -> set[SiteId]:
    """Return the refused sites that read what the policy keeps in float32 in a model with 16-bit weights."""
    refused: set[SiteId] = set()
    for traced in flow.traces:
        stored = {place.node: place.dtype for place in traced.placeholders if place.slot is Slot.PARAMETER}
        if set(LOW_PRECISION_DTYPES).isdisjoint(stored.values()):
            continue
        wide: set[fx.Node] = set()  # float32 weights and results of float32 rules, and what follows from them
        for node in traced.graph.nodes:
            site = flow.site(node)
            by_rule = site is not None and site.decision.cast is Cast.FLOAT32 and site.decision.explicit
            reads = not wide.isdisjoint(node.all_input_nodes)
            if by_rule or stored.get(node.name) is torch.float32 or (reads and node_dtype(node) in _WIDE):
                wide.add(node)
            if site is not None and reads and _refused(site):
                refused.add(site.id)
    return refused


CHECKS = (
    Check(OTHER_CODE, find_code_differs),
    Check("AMP213", find_code_unknown),
    Check("AMP214", find_flipped_branch),
    Check("AMP215", find_left_torch),
    Check("AMP302", find_hard_cast),
    Check("AMP303", find_double),
    Check("AMP304", find_probabilities),
    Check("AMP305", find_in_place),
    Check("AMP307", find_mixed_dtypes),
    Check("AMP308", find_mixed_numbers),
)
