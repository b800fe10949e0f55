"""Writes the decisions of an audit as a rule file that needs neither other policies nor measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import yaml

from ampaudit.core.sites import globs_of
from ampaudit.policy import RuleSet
from ampaudit.policy.schema import Reason
from ampaudit.trace.graph import Site, TracedModel
from ampaudit.trace.values import dtype_name

_REASONS = frozenset(Reason)
Key = tuple[str, str, tuple[tuple[str, str], ...], float | None]


def plan_rules(traced: TracedModel, rules: RuleSet, model: str) -> str:
    """Return a rule file (YAML) under which the same model is traced into the same graph.

    Its rules give the decision for each site that the policy's rules decide. Storage and defaults are those
    of the policy. Decisions of autocast regions in the model's code are left out, since these apply again.
    The title names the ``model``.
    """
    groups: dict[Key, list[Site]] = defaultdict(list)
    for site in traced.sites:
        if _is_ours(site, rules):
            decision = site.decision
            key = decision.rule or "default", decision.cast.value, decision.arguments, decision.clamp
            groups[key].append(site)
    ids = [site.id for site in traced.sites if site.facts is not None]
    form = dtype_name(traced.dtype)
    file, scale = rules.file, rules.file.loss_scale
    data = {
        "name": f"{rules.name[:59]}-plan",
        "title": f"the decisions of {rules.name} about {model}, {form}"[:2000],
        "level": file.level,
        "autocast": file.autocast,
        "weights": file.weights.model_dump(mode="json", exclude_defaults=True),
        "loss_scale": scale
        if isinstance(scale, str)
        else scale.model_dump(mode="json", exclude_defaults=True),
        "defaults": file.defaults.model_dump(mode="json"),
        "rules": _rules(groups, ids, form),
    }
    entries = {name: value for name, value in data.items() if value not in ({}, [])}
    return yaml.safe_dump(entries, sort_keys=False, width=110, allow_unicode=True)


def _is_ours(site: Site, rules: RuleSet) -> bool:
    """Return whether the policy, rather than the model's code, decided about a site."""
    if site.facts is None or site.role.inserted or site.decision.reason not in {*_REASONS, "default"}:
        return False
    if site.decision.rule is None:
        return site.facts.op in rules.op_names and site.decision.reason == "default"
    return True


def _rules(groups: dict[Key, list[Site]], ids: Sequence[str], form: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    used: dict[str, int] = defaultdict(int)
    for (rule, cast, arguments, clamp), sites in groups.items():
        used[rule] += 1
        decision = sites[0].decision
        entry: dict[str, Any] = {
            "id": rule if used[rule] == 1 else f"{rule}-{used[rule]}",
            "match": {
                "op": sorted({site.facts.op for site in sites if site.facts is not None}),
                "site": globs_of([site.id for site in sites], ids),
            },
            "when": {"dtype": [form]},
            "cast": cast,
            "arguments": dict(arguments),
            "clamp": clamp,
            "reason": decision.reason if decision.reason in _REASONS else Reason.SEMANTICS.value,
            "why": decision.why.partition(" (measured:")[0],
            "source": f"decided by {rule}",
        }
        entries.append({name: value for name, value in entry.items() if value not in ({}, None)})
    return entries
