"""Proposes fixes for a finding, the smallest first."""

from __future__ import annotations

from ampaudit.audit.advice.interface import AdviceContext, Proposal
from ampaudit.audit.advice.proposals import proposals
from ampaudit.audit.advice.source_edits import diff_of

__all__ = ["AdviceContext", "Proposal", "diff_of", "proposals"]
