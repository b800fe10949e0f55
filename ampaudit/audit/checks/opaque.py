"""AMP904 and AMP905: ops whose kernels compute what nobody looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext
from ampaudit.audit.checks.uncovered import findings_on_gaps
from ampaudit.report.finding import Finding

__all__ = ["CHECKS"]

_OF_ONNX = "export it as other operators: docs/onnx-operators.md lists those that are audited inside"


def find_opaque(context: CheckContext) -> Iterator[Finding]:
    """Yield one note per op without a twin, at its first site."""
    advice = "say what it computes with ampaudit.twin(), and its inside is audited"
    for finding in findings_on_gaps(context, "AMP904", advice):
        of_onnx = str(finding.op).startswith("onnxruntime")
        yield replace(finding, advice=_OF_ONNX) if of_onnx else finding


def find_unchecked(context: CheckContext) -> Iterator[Finding]:
    """Yield one note per op whose twin could not be compared with its kernel."""
    advice = "scan on a device that has the kernel, or compare the two in a test of your own"
    return findings_on_gaps(context, "AMP905", advice)


CHECKS = Check("AMP904", find_opaque), Check("AMP905", find_unchecked)
