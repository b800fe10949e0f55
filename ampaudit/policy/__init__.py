"""Cast policies: rule files as data, and the decision they give for one op. No torch in here."""

from __future__ import annotations

from ampaudit.policy.decide import Decision, OpFacts, RuleSet
from ampaudit.policy.load import load_policy, plain_fp32, policy_names

__all__ = ["Decision", "OpFacts", "RuleSet", "load_policy", "plain_fp32", "policy_names"]
