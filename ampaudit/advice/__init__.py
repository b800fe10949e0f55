"""Changes that may cure a finding, the smallest first; whoever asks tries them out."""

from __future__ import annotations

from ampaudit.advice.difference import diff_of
from ampaudit.advice.interface import Proposal, Subject
from ampaudit.advice.proposals import proposals

__all__ = ["Proposal", "Subject", "diff_of", "proposals"]
