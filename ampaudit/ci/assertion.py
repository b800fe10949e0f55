"""``assert_safe``: fails a test if a model is not safe, with the report as the message."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ampaudit.core.session import DEFAULT_SESSION, Session

if TYPE_CHECKING:
    from ampaudit.audit.inputs import Inputs, ModelLike
    from ampaudit.core.source_config import SourceConfig
    from ampaudit.report.check import Breach
    from ampaudit.report.model import Report

_WIDTH = 110
_LIMITS: tuple[Literal["min_headroom"], Literal["min_sqnr"]] = ("min_headroom", "min_sqnr")


class UnsafeModel(AssertionError):
    """Raised for a model that breaks or exceeds a budget.

    Attributes:
        report: Report of the audit.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def assert_safe(
    model: ModelLike,
    inputs: Inputs | None = None,
    *,
    batches: Iterable[Inputs] | None = None,
    source: SourceConfig | None = None,
    allow: str | Iterable[str] = (),
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> Report:
    """Audit a model as ``ampaudit.scan`` does, and raise an error if it is not safe.

    Args:
        model: Model, in the mode to audit.
        inputs: One batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        batches: Several batches instead of one.
        source: How to load a model from its location: weights, inputs, ``trust`` ...
        allow: Codes of findings that do not count.
        session: Context of the call: functions that receive progress and outputs, a backend ...
        **options: Fields of ``ScanConfig``. ``min_headroom`` is the minimum for every 16-bit site and
            ``min_sqnr`` the minimum for every output; both are off by default.

    Returns:
        The report, if the model is safe.

    Raises:
        UnsafeModel: The model is not safe; an ``AssertionError`` whose message is the report.
        AuditError: The audit cannot be carried out.
    """
    __tracebackhide__ = True  # pytest shows the test's line
    with _quiet_trace():
        from ampaudit.audit.config import ScanConfig, rules_of
        from ampaudit.audit.scan import scan
        from ampaudit.ci.judge import check_codes, judge, measured_in
        from ampaudit.report.check import Budgets

        allowed = check_codes(allow)
        settings: dict[str, Any] = {name: value for name, value in options.items() if name not in _LIMITS}
        limits: dict[str, Any] = {name: options[name] for name in _LIMITS if options.get(name) is not None}
        config = ScanConfig(**settings)
        config = config.changed(policy=rules_of(config.policy))  # one policy: ``scan`` takes several
        config.changed(**limits)  # validates the limits
        budgets = Budgets(config.fail_on, allowed, **limits)
        report = scan(model, inputs, batches=batches, source=source, config=config, session=session)
        breaches = judge(report, measured_in(report), budgets).breaches
        message = _message(report, breaches) if breaches else ""
    if breaches:
        raise UnsafeModel(message, report)
    return report


@contextlib.contextmanager
def _quiet_trace() -> Iterator[None]:
    """Detach handlers that others attached to torch's structured trace, which would fill pytest's log."""
    log = logging.getLogger("torch.__trace")
    foreign = [handler for handler in log.handlers if not type(handler).__module__.startswith("torch.")]
    for handler in foreign:
        log.removeHandler(handler)
    try:
        yield
    finally:
        for handler in foreign:
            log.addHandler(handler)


def _message(report: Report, breaches: Sequence[Breach]) -> str:
    """Format the exceeded budgets, and the report as in a terminal."""
    from ampaudit.core.text import escape_control
    from ampaudit.render.terminal import to_text

    codes = {finding.code for finding in report.findings}
    lines = [
        f"{b.budget} at {escape_control(b.where)}: {escape_control(b.what)}"
        for b in breaches
        if b.budget not in codes
    ]
    head = f"the model is not safe in {report.run.dtype} under policy {escape_control(report.run.policy)}"
    return "\n".join([head, *lines, "", to_text(report, _WIDTH).rstrip("\n")])
