"""AMP306: an op without a 16-bit kernel on common devices: it raises, or its library upcasts it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding, Severity
from ampaudit.trace import Site
from ampaudit.trace.caster import NO_KERNEL
from ampaudit.trace.fourier import is_fourier, signal_sizes
from ampaudit.trace.internals import has_kernel
from ampaudit.trace.opnames import base_name, is_foreign
from ampaudit.trace.values import fake_arguments

__all__ = ["CHECK"]

_ADVICE = "call it on x.float(); a rule with cast: float32 does the same"
_OF_ONNX = "nothing has to be done: ampaudit convert casts what the node takes and gives"
# LAPACK, MAGMA and cuSOLVER have neither float16 nor bfloat16
_PREFIXES = ("linalg_", "_linalg")
_NAMES = {
    "cholesky",
    "inverse",
    "pinverse",
    "svd",
    "qr",
    "lu_solve",
    "triangular_solve",
    "det",
}
_NAMES |= {"logdet", "slogdet", "geqrf", "ormqr", "lobpcg", "histc", "cholesky_solve", "cholesky_inverse"}
_HAVE_ONE = {
    "linalg_vector_norm",
    "linalg_norm",
    "linalg_cross",
    "linalg_vecdot",
    "linalg_matmul",
    "linalg_diagonal",
}


def find(context: CheckContext) -> Iterator[Finding]:
    """Find such ops with 16-bit input."""
    for site in context.graph_sites:
        said = _lacking(context, site)
        if said is not None:
            cause, severity = said
            advice = _OF_ONNX if severity is Severity.NOTE else _ADVICE
            yield finding_at(context, site, "AMP306", cause, advice, severity=severity, confidence="rule")


def _lacking(context: CheckContext, site: Site) -> tuple[str, Severity] | None:
    """Return the device that has no kernel for a site, and the severity."""
    base, form = context.flow.base(site), context.number_format.name
    node = context.flow.node(site)
    if isinstance(node.target, OpOverload) and is_fourier(node.target):
        return _fourier(node, node.target, site, form)
    if isinstance(node.target, OpOverload) and node.target.namespace == "onnxruntime":
        return f"{base} is run by ONNX Runtime in float32, and stays in float32", Severity.NOTE
    if site.decision is NO_KERNEL:
        where = context.record.device
        foreign = isinstance(node.target, OpOverload) and is_foreign(node.target)
        lacks = f"{base} refuses {form}" if foreign else f"torch has no {form} kernel for {base}"
        cause = f"{lacks} on this device ({where}); the audit continued in float32"
        if isinstance(node.target, OpOverload) and foreign and has_kernel(node.target, where.upper()):
            return cause, Severity.WARNING  # another device's kernel may take it
        return cause, Severity.ERROR
    if base in _HAVE_ONE or not (base in _NAMES or base.startswith(_PREFIXES)):
        return None
    if any(_is_low_precision(context, source) for source in node.all_input_nodes):
        return f"{base} has no {form} kernel on CUDA for every size", Severity.WARNING
    return None


def _fourier(node: fx.Node, op: OpOverload, site: Site, form: str) -> tuple[str, Severity] | None:
    """CUDA transforms float16 if the size is a power of two; a CPU has only float32 and float64."""
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


def _is_low_precision(context: CheckContext, node: object) -> bool:
    value = getattr(node, "meta", {}).get("val")
    return str(getattr(value, "dtype", "")) == f"torch.{context.number_format.name}"


CHECK = Check("AMP306", find)
