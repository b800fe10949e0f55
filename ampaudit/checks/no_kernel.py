"""AMP306: an op that has no 16-bit kernel on common devices: it raises, or its library upcasts it."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding, Severity
from ampaudit.trace.caster import NO_KERNEL

__all__ = ["CHECK"]

_ADVICE = "call it on x.float(); a rule with cast: float32 does the same"
# cuFFT takes half for powers of two only and never bfloat16; LAPACK, MAGMA and cuSOLVER have neither
_PREFIXES = ("fft_", "linalg_", "_fft", "_linalg")
_NAMES = {
    "stft",
    "istft",
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
    """Ops of that kind that are given 16-bit input."""
    for site in context.graph_sites:
        base = context.flow.base(site)
        if site.decision is NO_KERNEL:
            cause = (
                f"torch has no {context.number_format.name} kernel for {base}; the audit went on in float32"
            )
            # CUDA has kernels for half FFTs of some sizes
            severity = Severity.WARNING if "fft" in base else Severity.ERROR
            yield finding_at(context, site, "AMP306", cause, _ADVICE, severity=severity, confidence="rule")
            continue
        if base in _HAVE_ONE or not (base in _NAMES or base.startswith(_PREFIXES)):
            continue
        if any(_is_lowered(context, node) for node in context.flow.node(site).all_input_nodes):
            cause = f"{base} has no {context.number_format.name} kernel on CUDA for every size"
            yield finding_at(
                context, site, "AMP306", cause, _ADVICE, severity=Severity.WARNING, confidence="rule"
            )


def _is_lowered(context: CheckContext, node: object) -> bool:
    value = getattr(node, "meta", {}).get("val")
    return str(getattr(value, "dtype", "")) == f"torch.{context.number_format.name}"


CHECK = Check("AMP306", find)
