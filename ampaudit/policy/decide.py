"""One op in, one decision with its reason out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ampaudit.policy.schema import Cast, Rule, RuleFile

__all__ = ["Decision", "OpFacts", "RuleSet"]


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What a rule may look at: ``op`` is the ATen name (``softmax.int``), ``layer`` the module path."""

    op: str
    layer: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done to an op, which rule said so (``None``: no rule), and why."""

    cast: Cast
    rule: str | None
    reason: str
    why: str

    @property
    def explicit(self) -> bool:
        """Whether a rule mentions the op."""
        return self.rule is not None


class RuleSet:
    """A loaded policy, indexed so that a decision costs one look-up and the few rules it finds."""

    def __init__(self, file: RuleFile) -> None:
        self.file = file
        self._by_op: dict[str, list[tuple[int, Rule]]] = {}
        self._any_op: list[tuple[int, Rule]] = []
        for position, rule in enumerate(file.rules):
            for op in rule.match.op:
                self._by_op.setdefault(op, []).append((position, rule))
            if not rule.match.op:
                self._any_op.append((position, rule))
        self._fallback = Decision(file.defaults.cast, None, "default", file.defaults.why)

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.file.name

    @property
    def op_names(self) -> frozenset[str]:
        """Every ATen name that some rule mentions."""
        return frozenset(self._by_op)

    def decide(self, facts: OpFacts) -> Decision:
        """The first rule in file order that matches, or the fallback."""
        for rule in self._candidates(facts.op):
            if _applies(rule, facts):
                return Decision(rule.cast, rule.id, rule.reason.value, rule.why)
        return self._fallback

    def _candidates(self, op: str) -> Iterable[Rule]:
        named = self._by_op.get(op, [])
        if not self._any_op:
            return [rule for _, rule in named]
        return [rule for _, rule in sorted([*named, *self._any_op], key=lambda pair: pair[0])]


def _applies(rule: Rule, facts: OpFacts) -> bool:
    if rule.when.dtype and facts.dtype not in rule.when.dtype:
        return False
    layers = rule.match.layer
    return not layers or any(fnmatchcase(facts.layer, glob) for glob in layers)
