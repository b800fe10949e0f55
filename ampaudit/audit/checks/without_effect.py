"""AMP612: a difference from the reference that makes none on these inputs."""

from __future__ import annotations

from functools import partial

from ampaudit.audit.checks.interface import Check
from ampaudit.audit.checks.other_function import differences_with

__all__ = ["CHECK"]

CHECK = Check("AMP612", partial(differences_with, "AMP612"))
