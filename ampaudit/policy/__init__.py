"""Cast policies: loads rule files and decides casts by them, without importing torch."""

from __future__ import annotations

from typing import TypeAlias

from ampaudit.policy.decide import Decision, Measurement, OpFacts, RuleSet, TargetEnvironment
from ampaudit.policy.load import load_file, load_policy, plain_fp32, policy_names

__all__ = [
    "Decision",
    "Measurement",
    "OpFacts",
    "Policy",
    "RuleSet",
    "TargetEnvironment",
    "load_file",
    "load_policy",
    "plain_fp32",
    "policy_names",
]

Policy: TypeAlias = RuleSet  # the public name
