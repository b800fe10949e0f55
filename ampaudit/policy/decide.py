"""Decides the cast of an op by the rules of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ampaudit.core.formats import format_named
from ampaudit.policy.aten_ops import expand, inner_op
from ampaudit.policy.matching import Measurement, OpFacts, TargetEnvironment, applies, fits_environment
from ampaudit.policy.schema import Cast, Rule, RuleFile

__all__ = ["Decision", "NeighborSide", "RuleSet"]

NeighborSide = Literal["producer", "consumer"]
_NO_NEIGHBORS: frozenset[NeighborSide] = frozenset()
# casts by precision, lowest first; measured rules may only promote
_RANK = (
    (Cast.LOWER, Cast.ALLOW),
    (Cast.NARROWEST, Cast.INFER, Cast.CLEAR),
    (Cast.FOLLOW,),
    (Cast.WIDEST,),
    (Cast.SET_DTYPE, Cast.APPEND_DTYPE),
    (Cast.FLOAT32, Cast.DENY),
    (Cast.FORBID,),
)
RANK = {cast: rank for rank, casts in enumerate(_RANK) for cast in casts}


@dataclass(frozen=True, slots=True)
class Decision:
    """The cast of an op, the rule behind it (``None`` if no rule applies), and the reason."""

    cast: Cast
    rule: str | None
    reason: str
    why: str
    arguments: tuple[tuple[str, str], ...] = ()
    clamp: float | None = None

    @property
    def explicit(self) -> bool:
        """Whether a rule made the decision, not the default."""
        return self.rule is not None


class RuleSet:
    """A loaded policy, indexed by op so that each decision checks few rules.

    Args:
        file: Rule file.
        ops: ATen names by rule id, for rules that name ops; expanded from the file by default.
        environment: Target environment; rules for other devices or versions do not apply.
        location: Name or path by which another rule file extends this one; the policy's name by default.
    """

    def __init__(
        self,
        file: RuleFile,
        ops: Mapping[str, frozenset[str]] | None = None,
        environment: TargetEnvironment | None = None,
        location: str = "",
    ) -> None:
        self.file = file
        self.location = location or file.name
        self.environment = environment or TargetEnvironment()
        self.ops = ops if ops is not None else _expand_rules(file)
        rules = [rule for rule in file.rules if fits_environment(rule.when, self.environment)]
        self._static = _Index([rule for rule in rules if not rule.measured], self.ops)
        self._measured = _Index([rule for rule in rules if rule.measured], self.ops)
        self._fallback = Decision(file.defaults.cast, None, "default", file.defaults.why)
        self.measured = any(rule.measured for rule in rules)
        self.needs_graph = any(r.colored or r.when.producer or r.when.consumer for r in rules)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.file.title}>"

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.file.name

    @property
    def op_names(self) -> frozenset[str]:
        """All ATen names that rules mention."""
        return frozenset().union(*self.ops.values())

    def promotes(self, facts: OpFacts) -> bool:
        """Return whether the measurement of an op changes its decision."""
        return self.decide(facts) != self.decide(replace(facts, measurement=None))

    def for_environment(self, environment: TargetEnvironment) -> RuleSet:
        """Return the rules for another device or version."""
        return RuleSet(self.file, self.ops, environment, self.location)

    def decide(self, facts: OpFacts, near: frozenset[NeighborSide] = _NO_NEIGHBORS) -> Decision:
        """Apply the first matching rule or the default, and then the measured rules.

        Args:
            facts: Facts about the op.
            near: Sides on which the op has a float32 neighbor.
        """
        candidates = self._about(self._static, facts)
        static = next((rule for rule in candidates if applies(rule, facts, near)), None)
        decision = self._decision(static, facts) if static else self._fallback
        if facts.measurement is None:
            return decision
        for rule in self._about(self._measured, facts):
            promotes = rule.force or RANK[rule.cast] > RANK[decision.cast]
            if promotes and applies(rule, facts, near):
                promoted = self._decision(rule, facts)
                return replace(promoted, why=f"{promoted.why} {_measured_text(facts.measurement)}")
        return decision

    def _about(self, index: _Index, facts: OpFacts) -> tuple[Rule, ...]:
        """Return the rules about an op, or about the op inside it if no rule names the op itself."""
        inner = inner_op(facts.op)
        if inner is None or index.names(facts.op):
            return index.about(facts.op)
        return index.about(inner)

    def _decision(self, rule: Rule, facts: OpFacts) -> Decision:
        clamp = format_named(facts.dtype).max if rule.clamp == "max" else rule.clamp
        arguments = tuple(rule.arguments.items())
        return Decision(rule.cast, rule.id, rule.reason.value, rule.why, arguments, clamp)


class _Index:
    """Rules by op, in order; rules that name no op apply to every op."""

    def __init__(self, rules: list[Rule], ops: Mapping[str, frozenset[str]]) -> None:
        self._rules = [(rule, ops.get(rule.id)) for rule in rules]
        self._known: set[str] = set().union(*(names for _, names in self._rules if names))
        self._any = tuple(rule for rule, names in self._rules if names is None)
        self._about: dict[str, tuple[Rule, ...]] = {}

    def names(self, op: str) -> bool:
        return op in self._known

    def about(self, op: str) -> tuple[Rule, ...]:
        if op not in self._known:
            return self._any
        if op not in self._about:
            self._about[op] = tuple(rule for rule, names in self._rules if names is None or op in names)
        return self._about[op]


def _expand_rules(file: RuleFile) -> dict[str, frozenset[str]]:
    return {
        rule.id: frozenset(op for name in rule.match.op for op in expand(name))
        for rule in file.rules
        if rule.match.op
    }


def _measured_text(measurement: Measurement) -> str:
    peaks = (
        *(("weight", measurement.weight_peak), ("input", measurement.input_peak)),
        *(("output", measurement.output_peak), ("users' output", measurement.consumer_peak)),
    )
    text = ", ".join(f"{name} peak {peak:.4g}" for name, peak in peaks if peak is not None)
    return f"(measured: {text})"
