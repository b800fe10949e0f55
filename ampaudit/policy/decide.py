"""Decides the cast of an op by the rules of a policy.

A node is *allow* (always 16 bits), *deny* (dangerous, as is anything computed from it), *infer* (safe unless
downstream of a deny), *clear* (no numerical effect) or uncolored (float32). The steps are those of
``grappler/optimizers/auto_mixed_precision.cc``, commit 219b6ee; its handling of loops and tensor lists has no
counterpart in a traced graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from ampaudit.core.formats import format_named
from ampaudit.policy.schema import (
    COLORS,
    UNSET,
    Cast,
    EvidenceCondition,
    NumericCondition,
    Rule,
    RuleFile,
    When,
    expand,
    inner_op,
    same_value,
)

_FREE = (Cast.INFER, Cast.CLEAR)
_FLOAT32 = (Cast.FLOAT32, Cast.FORBID, Cast.SET_DTYPE, Cast.APPEND_DTYPE)
_BY_INPUTS = (Cast.FOLLOW, Cast.WIDEST)
NeighborSide = Literal["producer", "consumer"]
_NO_NEIGHBORS: frozenset[NeighborSide] = frozenset()
# fields of a measurement, in words
_PEAKS = {
    "weight_peak": "weight",
    "input_peak": "input",
    "output_peak": "output",
    "consumer_peak": "users' output",
}
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
    """The cast of an op, the rule that decided it (``None`` for the default), and the reason."""

    cast: Cast
    rule: str | None
    reason: str
    why: str
    arguments: tuple[tuple[str, str], ...] = ()
    clamp: float | None = None

    @property
    def explicit(self) -> bool:
        """Whether a rule made the decision, rather than the default."""
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

        ``near`` are the sides on which the op has a float32 neighbor.
        """
        static = next((rule for rule in self._static.about(facts.op) if applies(rule, facts, near)), None)
        decision = self._decision(static, facts) if static else self._fallback
        if facts.measurement is None:
            return decision
        for rule in self._measured.about(facts.op):
            promotes = rule.force or RANK[rule.cast] > RANK[decision.cast]
            if promotes and applies(rule, facts, near):
                promoted = self._decision(rule, facts)
                peaks = ((words, getattr(facts.measurement, name)) for name, words in _PEAKS.items())
                text = ", ".join(f"{words} peak {peak:.4g}" for words, peak in peaks if peak is not None)
                return replace(promoted, why=f"{promoted.why} (measured: {text})")
        return decision

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

    def about(self, op: str) -> tuple[Rule, ...]:
        """Return the rules for an op, or for the op inside it if no rule names the op itself."""
        if op not in self._known:
            op = inner_op(op) or op
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


def applies(rule: Rule, facts: OpFacts, near: Collection[str]) -> bool:
    """Return whether a rule that names this op applies, given its other conditions."""
    when, match = rule.when, rule.match
    return (
        (not when.dtype or facts.dtype in when.dtype)
        and (not when.producer or "producer" in near)
        and (not when.consumer or "consumer" in near)
        and (not match.layer or matches_any(match.layer, facts.layer))
        and (not match.layer_regex or any(compiled(p).search(facts.layer) for p in match.layer_regex))
        and (not match.module or matches_class(match.module, facts.classes))
        and (not match.attributes or with_attributes(facts.module, match.attributes))
        and (not match.parameter or any(matches_any(match.parameter, name) for name in facts.parameters))
        and (not match.site or matches_any(match.site, facts.site))
        and all(test.holds(facts.arguments.get(name, UNSET)) for name, test in when.arguments.items())
        and (when.depth is None or (facts.depth is not None and when.depth.holds(facts.depth)))
        and (when.evidence is None or _measured(when.evidence, facts.measurement, facts.dtype))
    )


def fits_environment(when: When, environment: TargetEnvironment) -> bool:
    """Return whether an environment meets a rule's conditions; an unknown device or version does not."""
    if when.capability is not None and (
        environment.capability is None or not when.capability.holds(environment.capability)
    ):
        return False
    if not when.versions:
        return True
    from packaging.specifiers import SpecifierSet

    return all(
        name in environment.versions
        and SpecifierSet(specifier).contains(environment.versions[name], prereleases=True)
        for name, specifier in when.versions.items()
    )


def matches_any(globs: Collection[str], text: str) -> bool:
    """Return whether one of the globs matches the whole text."""
    return any(fnmatchcase(text, glob) for glob in globs)


def matches_class(names: Collection[str], classes: Collection[str]) -> bool:
    """Return whether one of the qualified class names is among ``names``, with or without its module."""
    return any(name in names or name.rpartition(".")[2] in names for name in classes)


def class_names(kind: type) -> tuple[str, ...]:
    """Return the qualified names of a class and its bases, most derived first."""
    return tuple(f"{c.__module__}.{c.__qualname__}" for c in kind.__mro__ if c is not object)


def with_attributes(module: Any, attributes: Mapping[str, Any]) -> bool:
    """Return whether a module has all these attribute values."""
    return module is not None and all(
        same_value(_attribute(module, name), value) for name, value in attributes.items()
    )


def _attribute(module: Any, name: str) -> Any:
    """Return an attribute; one that cannot be read counts as missing."""
    try:
        return getattr(module, name, UNSET)
    except Exception:  # of a property
        return UNSET


def _measured(condition: EvidenceCondition, measurement: Measurement | None, dtype: str) -> bool:
    if measurement is None or (condition.mask is not None and condition.mask is not measurement.mask):
        return False
    peak = measurement.output_peak
    headroom = None if peak is None else format_named(dtype).headroom_bits(peak)
    pairs: list[tuple[NumericCondition | None, float | None]] = [
        (getattr(condition, name), getattr(measurement, name)) for name in _PEAKS
    ]
    pairs.append((condition.headroom_bits, headroom))
    return all(bound is None or (value is not None and bound.holds(value)) for bound, value in pairs)


@cache
def compiled(pattern: str) -> Any:
    """Compile a pattern with RE2, which matches in linear time.

    Raises:
        ValueError: RE2 rejects the pattern; it lacks back-references and look-around.
    """
    import re2

    options = re2.Options()
    options.log_errors = False  # RE2 would write them to file descriptor 2, truncated within a character
    try:
        compile_pattern: Callable[..., Any] = re2.compile
        return compile_pattern(pattern, options)
    except re2.error as error:
        (reason,) = error.args
        raise ValueError(reason.decode(errors="replace")) from error


@dataclass(frozen=True, slots=True)
class Measurement:
    """Largest finite magnitudes at one op in an FP32 run; ``None`` if there is no finite value."""

    weight_peak: float | None = None  # of its parameters and buffers
    input_peak: float | None = None  # of its other inputs
    output_peak: float | None = None
    consumer_peak: float | None = None  # of the outputs of the ops that use its output
    mask: bool = False  # whether an input or the output contains an attention mask, large by design

    def joined(self, other: Measurement) -> Measurement:
        """Combine two runs: the larger peaks, and a mask if either has one."""
        peaks = {
            name: max((p for p in (getattr(self, name), getattr(other, name)) if p is not None), default=None)
            for name in _PEAKS
        }
        return Measurement(**peaks, mask=self.mask or other.mask)


@dataclass(frozen=True, slots=True)
class TargetEnvironment:
    """The environment that the converted model will run in."""

    capability: float | None = None  # CUDA compute capability, such as 9.0; None without CUDA
    versions: Mapping[str, str] = field(default_factory=dict)  # of ``torch`` and ``cuda``


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The facts about an op."""

    op: str  # ATen name, such as ``softmax.int``
    layer: str  # path of the module whose forward calls it
    dtype: str  # 16-bit format of the run
    site: str = ""  # id in reports
    classes: tuple[str, ...] = ()  # qualified class names of the module and its bases, most derived first
    module: Any = None  # for its attributes
    parameters: tuple[str, ...] = ()  # names of the parameters and buffers among its inputs
    # scalars and lists by name, without those at their default
    arguments: Mapping[str, Any] = field(default_factory=dict)
    depth: int | None = None  # number of terms summed for one element of its output
    measurement: Measurement | None = None  # from the first run; None before it


@dataclass(frozen=True, slots=True)
class PlanSite:
    """The facts about an op in a graph, and the indices of the ops that produce its floating-point inputs."""

    facts: OpFacts
    inputs: tuple[int, ...]


def plan_graph(rules: RuleSet, sites: Sequence[PlanSite]) -> list[Decision]:
    """Decide the cast of each site, in order, in time linear in sites plus edges."""
    decisions = [rules.decide(site.facts) for site in sites]
    if not rules.needs_graph:
        return decisions
    decisions = _resolve_colors(decisions, sites)
    return _apply_neighbor_rules(rules, decisions, sites)


def _resolve_colors(decisions: list[Decision], sites: Sequence[PlanSite]) -> list[Decision]:
    if not any(d.cast in COLORS for d in decisions):
        return decisions
    low = color([d.cast for d in decisions], [site.inputs for site in sites])
    resolved = []
    for decision, is_low in zip(decisions, low, strict=True):
        if decision.cast in COLORS:
            neighbors = f"colored {'16-bit' if is_low else 'float32'} by its neighbors"
            how = {Cast.ALLOW: "always", Cast.DENY: "denied"}.get(decision.cast, neighbors)
            why = f"{decision.why} ({decision.cast}: {how})"
            decision = replace(decision, cast=Cast.LOWER if is_low else Cast.FLOAT32, why=why)
        resolved.append(decision)
    return resolved


def _apply_neighbor_rules(
    rules: RuleSet, decisions: list[Decision], sites: Sequence[PlanSite]
) -> list[Decision]:
    """Apply rules about neighbors to a fixed point; sites are only ever promoted to float32."""
    users = _users_of([site.inputs for site in sites])
    wide: list[bool] = []  # whether each result is float32, first by the decisions alone
    for decision, site in zip(decisions, sites, strict=True):
        by_inputs = decision.cast in _BY_INPUTS and any(wide[i] for i in site.inputs)
        wide.append(decision.cast in _FLOAT32 or by_inputs)
    pending = deque(range(len(sites)))
    while pending:
        index = pending.popleft()
        if wide[index]:
            continue
        near: set[NeighborSide] = set()
        if any(wide[i] for i in sites[index].inputs):
            near.add("producer")
        if any(wide[i] for i in users[index]):
            near.add("consumer")
        decision = rules.decide(sites[index].facts, frozenset(near)) if near else decisions[index]
        follows = decisions[index].cast in _BY_INPUTS and "producer" in near
        if follows or decision.cast in _FLOAT32:
            wide[index] = True
            if decision.cast in _FLOAT32:
                decisions[index] = decision
            pending.extend([*sites[index].inputs, *users[index]])
    return decisions


def color(colors: Sequence[Cast], inputs: Sequence[Sequence[int]]) -> list[bool]:
    """Decide which nodes run in 16 bits, in time linear in nodes plus edges.

    A cast that is not a color means float32. ``inputs`` are the indices of each node's input nodes.
    """
    users = _users_of(inputs)
    nodes = range(len(colors))

    def free(node: int) -> bool:
        return colors[node] in _FREE

    # 1 and 2: deny spreads forward through free nodes that lead to a deny or infer node
    leads = _reach((n for n in nodes if colors[n] in (Cast.DENY, Cast.INFER)), inputs, free)
    denied = _reach((n for n in nodes if colors[n] is Cast.DENY), users, lambda n: free(n) and n in leads)
    low = {n for n in nodes if colors[n] is Cast.ALLOW}

    # 3: free nodes with allow nodes on both sides
    def undecided(node: int) -> bool:
        return free(node) and node not in denied

    below = _reach(low, users, undecided)
    above = _reach(low, inputs, undecided)
    low |= {n for n in below & above if undecided(n)}

    # 4: clear nodes that touch a low node through clear nodes
    def clear(node: int) -> bool:
        return colors[node] is Cast.CLEAR and node not in denied

    both = [[*inputs[n], *users[n]] for n in nodes]
    low |= {n for n in _reach(low, both, clear) if clear(n)}
    return [n in low for n in nodes]


def _reach(
    starts: Iterable[int], edges: Sequence[Collection[int]], passes: Callable[[int], bool]
) -> set[int]:
    """Return the start nodes and every node reachable from them through passing nodes."""
    reached = set(starts)
    pending = list(reached)
    while pending:
        for node in edges[pending.pop()]:
            if node not in reached and passes(node):
                reached.add(node)
                pending.append(node)
    return reached


def _users_of(inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in inputs]
    for node, sources in enumerate(inputs):
        for source in sources:
            users[source].append(node)
    return users
