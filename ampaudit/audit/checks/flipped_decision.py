"""AMP209: rounding flips the choices of an op and thereby changes an output."""

from __future__ import annotations

from functools import partial

from ampaudit.audit.checks.interface import Check
from ampaudit.audit.checks.output_error import findings_with

__all__ = ["CHECK"]

CHECK = Check("AMP209", partial(findings_with, "AMP209"))
