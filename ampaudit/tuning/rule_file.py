"""Writes a choice as a rule file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ampaudit.core.sites import globs_of
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.schema import Cast, Reason

__all__ = ["loaded", "rule_file"]


def rule_file(
    base: RuleSet,
    name: str,
    title: str,
    ops: Mapping[Reason, Sequence[str]],
    weights: Sequence[str],
    every: tuple[Sequence[str], Sequence[str]],
) -> str:
    """Return a rule file (YAML) that extends a policy and keeps ops and weights in float32.

    Args:
        base: the policy to extend.
        name: of the new one.
        title: its title.
        ops: sites in float32, by the reason.
        weights: names of weights that are stored in float32.
        every: all sites and all weights, so that patterns match no others.
    """
    sites, names = every
    data: dict[str, Any] = {"name": name, "title": title, "extends": [base.location or base.name]}
    if weights:
        stored = base.file.weights.model_dump(mode="json", exclude_defaults=True)
        data["weights"] = stored | {"keep": [{"parameter": globs_of(weights, names)}]}
    rules = [_rule(reason, globs_of(members, sites)) for reason, members in ops.items() if members]
    if rules:
        data["rules"] = rules
    return yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True)


_WHY = {
    Reason.RANGE: "its values leave the range of the 16-bit format.",
    Reason.PRECISION: "the accuracy that was asked for needs it.",
    Reason.NO_KERNEL: "PyTorch has no 16-bit kernel for it.",
}


def _rule(reason: Reason, sites: list[str]) -> dict[str, Any]:
    return {
        "id": f"tuned/{reason.value}",
        "match": {"site": sites},
        "cast": Cast.FLOAT32.value,
        "reason": reason.value,
        "why": _WHY[reason],
        "source": "ampaudit tune",
    }


def loaded(text: str) -> RuleSet:
    """Return the rules of a rule file's text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.yaml"
        path.write_text(text, "utf-8")
        rules = load_policy(path)
    return RuleSet(rules.file, rules.ops, rules.environment)
