"""Checks well-formed rules for mistakes, without a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from ampaudit.core.errors import PolicyError
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.untrusted import describe
from ampaudit.policy.aten_ops import UnknownOp, aten_arguments
from ampaudit.policy.matching import compiled
from ampaudit.policy.schema import Cast, Match, Rule, RuleFile, When
from ampaudit.policy.yamlfile import YamlDocument

__all__ = ["check_rules", "suspicious", "unknown_op"]

Ops = Mapping[str, frozenset[str]]
_BOTH = frozenset(LOW_PRECISION_NAMES)
_APPENDABLE = frozenset({"norm.Scalar", "norm.ScalarOpt_dim"})
_LOOKS_LIKE_REGEX = re.compile(r"[\\^$|]|\.\*|\.\+")


def check_rules(document: YamlDocument, file: RuleFile, ops: Ops) -> None:
    """Reject duplicate ids, conflicts, rules that never match, and impossible conditions.

    Raises:
        PolicyError: with file, line and column.
    """
    if file.weights.clip is not None and file.weights.storage != "lower":
        where = document.at(("weights", "clip"))
        raise PolicyError(f"{where}: weights are clipped when they are stored: that needs 'storage: lower'")
    seen: set[str] = set()
    for number, rule in enumerate(file.rules):
        if rule.id in seen:
            where = document.at(("rules", number, "id"))
            raise PolicyError(f"{where}: duplicate rule id {describe(rule.id)!r}", hint="rename one")
        seen.add(rule.id)
        for key, problem in _problems(rule, ops.get(rule.id), file.level):
            raise PolicyError(f"{document.at(('rules', number, *key))}: {problem}", hint="see docs/rules.md")
    for measured in (False, True):
        _check_order(document, file, ops, measured)


def _problems(rule: Rule, ops: frozenset[str] | None, level: str) -> Iterator[tuple[tuple[str, ...], str]]:
    when = rule.when
    if (rule.colored or when.producer or when.consumer) and level != "graph":
        yield ("cast",), f"rule {describe(rule.id)!r} looks at neighbors: that needs 'level: graph'"
    if rule.measured and rule.colored:
        yield ("cast",), "a measured rule cannot assign a color"
    if rule.measured and rule.cast in (Cast.LOWER, Cast.NARROWEST) and not rule.force:
        yield ("cast",), "a measured rule may only raise the precision, unless it says 'force: true'"
    if rule.force and not rule.measured:
        yield ("force",), "only a rule with 'when.evidence' can be forced"
    for pattern in rule.match.layer_regex:
        try:
            compiled(pattern)
        except ValueError as error:
            yield (
                ("match", "layer_regex"),
                f"{describe(pattern)!r} is not a pattern of RE2: {describe(error)}",
            )
    for name, wanted in when.versions.items():
        if not _is_specifier(wanted):
            yield (
                ("when", "versions", name),
                f"{describe(wanted)!r} is not a version condition such as '>=2.1,<3'",
            )
    yield from _argument_problems(rule, ops)


def _argument_problems(rule: Rule, ops: frozenset[str] | None) -> Iterator[tuple[tuple[str, ...], str]]:
    if ops is None:
        return
    known = {name: aten_arguments(name) for name in ops}
    names = {arg for arguments in known.values() if arguments for arg in arguments}
    if names:
        for place, given in (("when", rule.when.arguments), ("", rule.arguments)):
            for name in set(given) - names:
                near = difflib.get_close_matches(name, names, n=1)
                meant = (
                    f"; did you mean {near[0]!r}?"
                    if near
                    else f"; they have {describe(', '.join(sorted(names)), 120)}"
                )
                key = (place, "arguments", name) if place else ("arguments", name)
                yield key, f"no op of this rule has an argument {describe(name)!r}{meant}"
    if rule.cast is Cast.SET_DTYPE:
        lacking = [op for op, arguments in known.items() if arguments and "dtype" not in arguments]
        if lacking:
            yield ("cast",), f"{min(lacking)} has no argument 'dtype' to set"
    if rule.cast is Cast.APPEND_DTYPE and ops - _APPENDABLE:
        yield ("cast",), f"{min(ops - _APPENDABLE)} has no overload that takes a dtype"


def _is_specifier(text: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True


def _check_order(document: YamlDocument, file: RuleFile, ops: Ops, measured: bool) -> None:
    """Reject rules about ops that an earlier unconditional rule decides."""
    decided: dict[tuple[str, str], Rule] = {}
    everything: dict[str, Rule] = {}
    for number, rule in enumerate(file.rules):
        if rule.measured is not measured:
            continue
        formats = frozenset(rule.when.dtype) or _BOTH
        where = document.at(("rules", number, "match"))
        over = [everything[form] for form in formats if form in everything]
        if len(over) == len(formats):
            raise _never(where, rule, over[0])
        mine = ops.get(rule.id)
        if mine is None:
            if rule.match == Match() and _plain(rule.when):
                everything |= dict.fromkeys(formats, rule)
            continue
        taken = {pair: decided[pair] for op in mine for form in formats if (pair := (op, form)) in decided}
        for (op, _), earlier in sorted(taken.items(), key=lambda item: item[0]):
            if earlier.cast is not rule.cast:
                at, other = document.at(("rules", number, "match", "op")), describe(earlier.id)
                raise PolicyError(
                    f"{at}: conflict: {op} is {rule.cast} here and {earlier.cast} in rule {other!r}",
                    hint="remove it from one of them, or give the first a condition",
                )
        if mine and len(taken) == len(mine) * len(formats):
            raise _never(where, rule, next(iter(taken.values())))
        if _plain(rule.when) and rule.match.model_fields_set <= {"op"}:
            for op in mine:
                decided |= {(op, form): rule for form in formats if (op, form) not in decided}


def _plain(when: When) -> bool:
    return when.model_fields_set <= {"dtype"}


def _never(where: str, rule: Rule, earlier: Rule) -> PolicyError:
    own, other = describe(rule.id), describe(earlier.id)
    return PolicyError(
        f"{where}: rule {own!r} can never match: rule {other!r} above decides all of its ops",
        hint="move it up, or remove it",
    )


def suspicious(document: YamlDocument, file: RuleFile, ops: Ops, joined: RuleFile) -> Iterator[str]:
    """Yield a one-line warning for each construct that is valid but probably unintended."""
    for number, rule in enumerate(file.rules):
        place = document.at(("rules", number, "match"))
        for glob in rule.match.layer:
            if _LOOKS_LIKE_REGEX.search(glob):
                shown = describe(glob)
                yield f"{place}: the glob {shown!r} looks like a regular expression; use layer_regex for one"
        if rule.match.op and not ops.get(rule.id):
            yield f"{place}: none of the ops of rule {describe(rule.id)!r} has a counterpart in PyTorch"
        foreign = sorted(op for op in ops.get(rule.id, ()) if "::" in op)
        if foreign:
            yield f"{place}: {foreign[0]} belongs to another library: its name cannot be checked"
    mine = {op for rule in file.rules if rule.match.model_fields_set == {"op"} for op in ops.get(rule.id, ())}
    for rule in joined.rules[len(file.rules) :]:
        names = ops.get(rule.id)
        if names and names <= mine:
            yield f"{document.path}: the inherited rule {describe(rule.id)!r} can no longer match"


def unknown_op(where: str, name: str, error: UnknownOp, vocabulary: str | None) -> PolicyError:
    """Return the error for an unknown op name."""
    whose = f"the vocabulary {vocabulary!r}" if vocabulary else "ATen"
    meant = f"did you mean {error.near!r}? " if error.near else ""
    other = "an op of another library is written library::op"
    return PolicyError(f"{where}: {whose} has no op {describe(name)!r}", hint=f"{meant}{other}")
