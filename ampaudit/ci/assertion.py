"""``assert_safe``: a test fails where a model would break, with the report as its message."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from ampaudit.policy import RuleSet
    from ampaudit.report.budgets import Breach
    from ampaudit.report.finding import FailOn
    from ampaudit.report.model import Report

__all__ = ["UnsafeModel", "assert_safe"]

_WIDTH = 110


class UnsafeModel(AssertionError):
    """A model breaks, or comes nearer to the limit than was allowed.

    Attributes:
        report: the audit, with every finding and number.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def assert_safe(
    model: nn.Module,
    inputs: Any = None,
    *,
    batches: Iterable[Any] | None = None,
    dtype: str = "float16",
    policy: str | RuleSet = "ampaudit",
    min_headroom: float | None = None,
    min_sqnr: float | None = None,
    fail_on: FailOn = "error",
    allow: Iterable[str] = (),
    **options: Any,
) -> Report:
    """Audit a model as ``ampaudit.scan`` does; the report, if the model is safe.

    Args:
        model: in the mode that is to be audited.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        batches: several batches instead.
        dtype: ``float16`` or ``bfloat16``.
        policy: what is lowered: ``torch-cuda`` is autocast, ``half`` is ``model.half()``.
        min_headroom: bits that every 16-bit site must keep below the format's end.
        min_sqnr: dB that every output must keep against FP32.
        fail_on: severity from which a finding counts.
        allow: codes of findings that do not count.
        **options: see ``ampaudit.scan``.

    Raises:
        UnsafeModel: an ``AssertionError`` whose message is the report.
        AuditError: the audit could not be carried out.
    """
    __tracebackhide__ = True  # pytest shows the test's line
    from ampaudit.trace.isolation import preserved

    with preserved(), _quiet_trace():  # some of what is imported next draws random numbers
        from ampaudit.audit.scan import scan
        from ampaudit.ci.judge import breaches, check_codes, measured_in
        from ampaudit.report.budgets import Budgets

        allowed = tuple(allow)
        check_codes(allowed)
        budgets = Budgets(fail_on=fail_on, allow=allowed, min_headroom=min_headroom, min_sqnr=min_sqnr)
        report = scan(model, inputs, batches=batches, dtype=dtype, policy=policy, fail_on=fail_on, **options)
        found = list(breaches(report, measured_in(report), budgets))
        message = _message(report, found) if found else ""
    if found:
        raise UnsafeModel(message, report)
    return report


@contextlib.contextmanager
def _quiet_trace() -> Iterator[None]:
    """Without foreign handlers on torch's structured trace: pytest's shows a page of empty lines."""
    log = logging.getLogger("torch.__trace")
    foreign = [handler for handler in log.handlers if not type(handler).__module__.startswith("torch.")]
    for handler in foreign:
        log.removeHandler(handler)
    try:
        yield
    finally:
        for handler in foreign:
            log.addHandler(handler)


def _message(report: Report, found: list[Breach]) -> str:
    """The budgets that are exceeded, and the report as the terminal shows it."""
    from ampaudit.core.text import escape_control
    from ampaudit.render.terminal import to_text

    codes = {finding.code for finding in report.findings}
    lines = [
        f"{b.budget} at {escape_control(b.where)}: {escape_control(b.what)}"
        for b in found
        if b.budget not in codes
    ]
    head = f"the model is not safe in {report.run.dtype} under policy {escape_control(report.run.policy)}"
    return "\n".join([head, *lines, "", to_text(report, _WIDTH).rstrip("\n")])
