"""Gaps of the audit, and ops without a 16-bit kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import PurePath

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about, finding_at
from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId
from ampaudit.core.text import listed
from ampaudit.findings.finding import Finding, Gap, GapKind, Severity
from ampaudit.trace import Role, Site
from ampaudit.trace.caster import NO_KERNEL
from ampaudit.trace.internals import has_kernel
from ampaudit.trace.kernels import is_fourier, signal_sizes
from ampaudit.trace.opnames import base_name, is_foreign, named_arguments
from ampaudit.trace.path.reads import ReadKind
from ampaudit.trace.values import fake_arguments

_OPAQUE_OF_ONNX = "export it as other operators: docs/onnx-operators.md lists those that are audited inside"
_NO_KERNEL_ADVICE = "call it on x.float(); a rule with cast: float32 does the same"
_NO_KERNEL_OF_ONNX = "nothing has to be done: ampaudit convert casts the inputs and outputs of the node"
# LAPACK, MAGMA and cuSOLVER have neither float16 nor bfloat16
_PREFIXES = ("linalg_", "_linalg")
_OUTSIDE = "what other code makes of them is taken from FP32"
_OTHER_CODE = "16 bits would run code that was not audited"
_INSIDE = "it is run as one op, and only its results are measured"


def foreign_sites(context: CheckContext) -> Iterator[Site]:
    """Return the sites that compute with an op from outside ATen."""
    for site in context.graph_sites:
        if site.role is Role.COMPUTE and "." in site.op and not site.op.startswith(("aten.", "prims.")):
            yield site


def gaps_of(context: CheckContext) -> tuple[Gap, ...]:
    """Return what the audit did not cover: one gap per op and kind, at its first site in graph order."""
    candidates = [*context.record.gaps]
    candidates += [Gap(site.id, GapKind.OPAQUE, site.op, _INSIDE) for site in foreign_sites(context)]
    for site in context.graph_sites:
        if site.twin and (reason := context.record.twins.get(site.twin.op, "nothing was run")):
            candidates.append(Gap(site.id, GapKind.UNCHECKED_TWIN, site.twin.op, reason))
    for read in context.record.path.reads.values():
        if read.kind is ReadKind.ARRAY:
            candidates.append(Gap(read.place, GapKind.OUTSIDE, f"{read.name}()", _OUTSIDE))
        elif read.differing:
            line = read.source and f" at {PurePath(read.source.file).name}:{read.source.line}"
            candidates.append(Gap(read.place, GapKind.OTHER_CODE, f"{read.name}{line or ''}", _OTHER_CODE))
    if (not_run := modules_not_run(context)) is not None:
        candidates.append(not_run)
    order = {site.id: number for number, site in enumerate(context.sites)}
    gaps: dict[tuple[GapKind, str], Gap] = {}
    for gap in sorted(candidates, key=lambda gap: order.get(gap.site, len(order))):
        first = gaps.setdefault((gap.kind, gap.op), gap)
        if first is not gap:
            gaps[gap.kind, gap.op] = replace(first, sites=first.sites + 1)
    return tuple(gaps.values())


def findings_on_gaps(code: str, advice: str, context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each gap that has this code."""
    for gap in gaps_of(context):
        if gap.kind.code == code:
            several = gap.sites > 1 and gap.kind is not GapKind.UNCHECKED_TWIN
            more = f", at {gap.sites} sites" if several else ""
            yield finding_at(context, context.site[gap.site], code, f"{gap.in_words}{more}", advice)


def find_unmentioned(context: CheckContext) -> Iterator[Finding]:
    """Yield one note per op; ATen ops without a rule are counted in the report's coverage."""
    reported: set[str] = set()
    for site in () if context.config.ranges else foreign_sites(context):
        if not site.decision.explicit and site.op not in reported:
            reported.add(site.op)
            cause = f"{site.op} is not an ATen op, and no rule mentions it: it gets the dtype of its inputs"
            advice = "add a rule that names it, with what its kernel can hold"
            yield finding_at(context, site, "AMP902", cause, advice, confidence="rule")


def modules_not_run(context: CheckContext) -> Gap | None:
    """Return the gap of the modules and experts whose parameters no batch used, with their share."""
    used, sizes, parts = context.parameters
    idle = {name: size for name, size in sizes.items() if name not in used}
    modules = _whole_modules(idle, used)
    experts = [
        f"{part.unused} of {part.of} experts of {layer or '(top module)'}" for layer, part in parts.items()
    ]
    if not modules and not experts:
        return None
    unused = sum(idle.values()) + sum(part.elements for part in parts.values())
    share = unused / max(sum(sizes.values()), 1)
    names = listed([*modules, *experts], 3)
    few = f"{share:.0%}" if share >= 0.005 else "less than 1%"
    site = SiteId(f"{[*modules, *parts][0]}/unused")
    count = len(modules) + len(experts)
    return Gap(site, GapKind.NOT_RUN, f"{names} ({few} of the weights)", "no input reaches it", count)


def _whole_modules(idle: Iterable[str], used: Collection[str]) -> list[str]:
    """Return the largest modules of which no layer is used, in the order of their layers."""
    running = {"", *used, *(layer[:end] for layer in used for end in range(len(layer)) if layer[end] == ".")}
    modules: dict[str, None] = {}
    for layer in idle:
        parts = layer.split(".")
        wholes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        modules[next((whole for whole in wholes if whole not in running), layer) or "(top module)"] = None
    return list(modules)


def find_not_taken(context: CheckContext) -> Iterator[Finding]:
    """Yield one note about all modules that did not run."""
    gap = modules_not_run(context)
    if gap is not None:
        cause = f"no input runs {gap.op}"
        advice = "also scan inputs that run them"
        layer = gap.site.rpartition("/")[0]
        yield finding_about("AMP903", gap.site, layer, cause, advice)


def find_opaque(context: CheckContext) -> Iterator[Finding]:
    """Yield one note per op without a twin, at its first site."""
    advice = "register a twin with ampaudit.twin(), so that its inside is audited"
    for finding in findings_on_gaps("AMP904", advice, context):
        of_onnx = str(finding.op).startswith("onnxruntime")
        yield replace(finding, advice=_OPAQUE_OF_ONNX) if of_onnx else finding


def find_no_kernel(context: CheckContext) -> Iterator[Finding]:
    """Find ops with 16-bit input that have no 16-bit kernel."""
    for site in context.graph_sites:
        if (problem := _missing_kernel(context, site)) is not None:
            cause, severity = problem
            advice = _NO_KERNEL_OF_ONNX if severity is Severity.NOTE else _NO_KERNEL_ADVICE
            yield finding_at(context, site, "AMP306", cause, advice, severity=severity, confidence="rule")


def _missing_kernel(context: CheckContext, site: Site) -> tuple[str, Severity] | None:
    """Return which device has no kernel for a site, and the severity; ``None`` if each has one."""
    base, form = context.flow.base(site), context.number_format.name
    node = context.flow.node(site)
    op = node.target if isinstance(node.target, OpOverload) else None
    if op is not None and is_fourier(op):
        return _missing_fft_kernel(node, op, site, form)
    if op is not None and op.namespace == "onnxruntime":
        return f"{base} is run by ONNX Runtime in float32, and stays in float32", Severity.NOTE
    if site.decision is NO_KERNEL:
        where, foreign = context.record.device, op is not None and is_foreign(op)
        lacks = f"{base} refuses {form}" if foreign else f"torch has no {form} kernel for {base}"
        cause = f"{lacks} on this device ({where}); the audit continued in float32"
        # another device's kernel may take it
        elsewhere = op is not None and foreign and has_kernel(op, where.upper())
        return cause, Severity.WARNING if elsewhere else Severity.ERROR
    dtypes = {str(getattr(source.meta.get("val"), "dtype", "")) for source in node.all_input_nodes}
    if f"torch.{form}" not in dtypes or (base == "cdist" and op is not None and _multiplies(op, node)):
        return None
    if base in having("no_16_bit_kernel_on_cuda"):
        return f"torch has no {form} kernel for {base} on CUDA", Severity.WARNING
    lacks_kernel = base.startswith(_PREFIXES) and base not in having("linalg_in_16_bits")
    if lacks_kernel or base in having("no_16_bit_kernel"):
        return f"torch has no {form} kernel for {base}", Severity.ERROR
    return None


def _multiplies(op: OpOverload, node: fx.Node) -> bool:
    """Return whether ``cdist`` computes a matrix product, as ATen decides, and calls no kernel of its own."""
    arguments = named_arguments(op, *fake_arguments(node))
    rows = max(arguments[name].shape[-2] for name in ("x1", "x2"))
    mode = arguments.get("compute_mode") or 0
    return arguments.get("p", 2.0) == 2.0 and (mode == 1 or (mode == 0 and rows > 25))


def _missing_fft_kernel(node: fx.Node, op: OpOverload, site: Site, form: str) -> tuple[str, Severity] | None:
    """Return the same for FFTs: CUDA supports float16 for powers of two, CPUs only float32 and float64."""
    base = base_name(op)
    args, kwargs = fake_arguments(node)
    odd = [size for size in signal_sizes(op, args, kwargs) if size & (size - 1)]
    if site.decision is NO_KERNEL and not (form == "float16" and odd):
        return f"{base} has no {form} kernel on any device; the audit continued in float32", Severity.ERROR
    half = any(
        getattr(v, "dtype", None) in (torch.float16, torch.complex32) for v in pytree.tree_leaves(args)
    )
    if odd and (site.decision is NO_KERNEL or half):
        cause = f"{base} has float16 kernels on CUDA only for powers of two, and {odd[0]} is not one"
        return cause, Severity.ERROR
    if not half:
        return None
    return f"{base} has no float16 kernel on a CPU; CUDA has one for powers of two", Severity.WARNING


_UNCOVERED_ADVICE = "judge this op by hand; the sites after it are audited"
_UNCHECKED_ADVICE = "scan on a device that has the kernel, or compare the two in a test of your own"
CHECKS = (
    Check("AMP901", partial(findings_on_gaps, "AMP901", _UNCOVERED_ADVICE)),
    Check("AMP902", find_unmentioned),
    Check("AMP903", find_not_taken),
    Check("AMP904", find_opaque),
    Check("AMP905", partial(findings_on_gaps, "AMP905", _UNCHECKED_ADVICE)),
    Check("AMP306", find_no_kernel),
)
