"""Grades an op's own error by its effect on the model's outputs."""

from __future__ import annotations

from ampaudit.audit.checks.interface import CheckContext
from ampaudit.report.finding import Severity
from ampaudit.trace import Role, Site

__all__ = ["local_error_matters"]

NOTICEABLE_DB = 10.0  # errors of one op this far above the threshold still show in an output


def local_error_matters(context: CheckContext, site: Site) -> Severity | None:
    """Return the severity of an op's own error; ``None`` if the op is accurate enough.

    An error that no output of the model shows is a note.
    """
    db = context.observed(site.id).local_sqnr_db
    meant = site.id in context.record.by_design or site.id in context.record.masks
    own = meant or context.from_weight(site) is not None
    if db is None or db >= context.min_sqnr or own or site.role is not Role.COMPUTE:
        return None
    accuracies = [accuracy for _, _, accuracy in context.outputs if accuracy is not None]
    shows = min(accuracies, default=0.0) < context.min_sqnr + NOTICEABLE_DB
    return Severity.WARNING if shows else Severity.NOTE
