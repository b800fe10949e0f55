"""Cast policies: loads rule files and decides casts by them, without importing torch."""

from __future__ import annotations

from typing import TypeAlias

from ampaudit.policy.decide import Decision, RuleSet
from ampaudit.policy.load import load_file, load_policy, plain_fp32
from ampaudit.policy.matching import Measurement, OpFacts, TargetEnvironment
from ampaudit.policy.scaling import policy_names

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
