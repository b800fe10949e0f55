"""Loads a policy by name or path, including the policies that it extends."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ampaudit.core.errors import PolicyError, did_you_mean
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.untrusted import describe
from ampaudit.policy.aten_ops import UnknownOp, aten_arguments, expand
from ampaudit.policy.decide import RuleSet
from ampaudit.policy.matching import compiled
from ampaudit.policy.scaling import policy_names, profile, rules_directory
from ampaudit.policy.schema import Cast, Match, Rule, RuleFile, When
from ampaudit.policy.yamlfile import YamlDocument, read_yaml

__all__ = ["PLAIN_FP32", "Loaded", "load_file", "load_policy", "load_vocabulary", "plain_fp32"]

Ops = Mapping[str, frozenset[str]]
_BOTH = frozenset(LOW_PRECISION_NAMES)
_APPENDABLE = frozenset({"norm.Scalar", "norm.ScalarOpt_dim"})
_LOOKS_LIKE_REGEX = re.compile(r"[\\^$|]|\.\*|\.\+")
_SUFFIXES = (".yaml", ".yml")
_MAX_PARENTS = 8
# keys that a policy inherits from the first of its parents that has them
_INHERITED = ("level", "autocast", "weights", "loss_scale", "defaults")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A policy with inherited rules, the ATen names of each rule, and warnings."""

    path: Path
    file: RuleFile
    ops: dict[str, frozenset[str]]
    warnings: tuple[str, ...]

    @property
    def rules(self) -> RuleSet:
        """Return the rule set of the policy."""
        shipped = self.path.parent == rules_directory()
        return RuleSet(self.file, self.ops, location="" if shipped else str(self.path))


def load_policy(name_or_path: str | Path) -> RuleSet:
    """Load a policy.

    Args:
        name_or_path: the name of a shipped policy, or the path of a rule file.

    Returns:
        The policy, with inherited rules.

    Raises:
        PolicyError: the name is unknown, or the file is unreadable or invalid (with line and column).
    """
    if not isinstance(name_or_path, str | Path):
        raise PolicyError(f"the policy is of type {type(name_or_path).__name__}")
    return load_file(str(name_or_path)).rules


def load_file(name_or_path: str) -> Loaded:
    """Load a policy with its path and warnings; raises the same errors as ``load_policy``."""
    return _load(_find(name_or_path, Path()), ())


PLAIN_FP32 = "fp32"  # names the absence of a policy


def plain_fp32(whole: frozenset[str] = frozenset()) -> RuleSet:
    """Return a policy without casts; composite ops in ``whole`` are not split."""
    return RuleSet(RuleFile(name=PLAIN_FP32, title="no casts", level="calls"), {"": whole} if whole else None)


def _find(name_or_path: str, beside: Path) -> Path:
    if name_or_path in policy_names():  # a file that lies about must not take the place of a shipped one
        return rules_directory() / f"{name_or_path}.yaml"
    path = beside / name_or_path
    with contextlib.suppress(OSError):  # longer than a path can be
        if path.suffix in _SUFFIXES or path.is_file():
            return path
    meant = did_you_mean(name_or_path, policy_names())
    raise PolicyError(
        f"unknown policy {describe(name_or_path)!r}",
        hint=f"{meant}shipped policies: {', '.join(policy_names())}; or pass the path of a rule file",
    )


def _load(path: Path, children: tuple[Path, ...]) -> Loaded:
    return _shipped(path) if path.parent == rules_directory() else _read(path, children)


@cache
def _shipped(path: Path) -> Loaded:
    """Load a shipped policy once; each scan needs CUDA autocast's rules besides its own."""
    return _read(path, ())


def _read(path: Path, children: tuple[Path, ...]) -> Loaded:
    document = read_yaml(path)
    file = _validated(document)
    ops = _ops_of(document, file)
    check_rules(document, file, ops)
    if isinstance(file.loss_scale, str):
        profile(file.loss_scale, document.at(("loss_scale",)))
    parents = [_parent(document, index, name, children) for index, name in enumerate(file.extends)]
    return _joined(document, file, ops, parents)


def _parent(document: YamlDocument, index: int, name: str, children: tuple[Path, ...]) -> Loaded:
    where = document.at(("extends", index))
    chain = (*children, document.path.resolve())
    try:
        path = _find(name, document.path.parent)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.args[0]}", hint=error.hint) from error
    if path.resolve() in chain:
        names = " -> ".join(p.stem for p in (*chain[chain.index(path.resolve()) :], path))
        raise PolicyError(f"{where}: a policy extends itself: {describe(names)}", hint="remove one extends")
    if len(chain) > _MAX_PARENTS:
        raise PolicyError(f"{where}: more than {_MAX_PARENTS} policies on top of each other")
    return _load(path, chain)


def _joined(
    document: YamlDocument, file: RuleFile, ops: dict[str, frozenset[str]], parents: list[Loaded]
) -> Loaded:
    rules: list[Rule] = list(file.rules)
    inherited: dict[str, Any] = {}
    dropped = set(file.drop)
    for parent in parents:
        given = parent.file.model_fields_set
        for key in _INHERITED:
            if key in given and key not in file.model_fields_set:
                inherited.setdefault(key, getattr(parent.file, key))
        known = {rule.id for rule in rules}
        taken = [r for r in parent.file.rules if r.id not in known and r.id not in file.drop]
        dropped -= {rule.id for rule in parent.file.rules}
        rules.extend(taken)
        ops = {rule.id: parent.ops[rule.id] for rule in taken if rule.id in parent.ops} | ops
    if dropped:
        name = min(dropped)
        where = document.at(("drop", file.drop.index(name)))
        raise PolicyError(
            f"{where}: no inherited rule has the id {describe(name)!r}", hint="see ampaudit rules show"
        )
    joined = file.model_copy(update=inherited | {"rules": tuple(rules)})
    return Loaded(document.path, joined, ops, tuple(suspicious(document, file, ops, joined)))


def _ops_of(document: YamlDocument, file: RuleFile) -> dict[str, frozenset[str]]:
    find = _vocabulary_of(document, file).expand if file.vocabulary else expand
    found: dict[str, frozenset[str]] = {}
    for number, rule in enumerate(file.rules):
        names: set[str] = set()
        for index, name in enumerate(rule.match.op):
            try:
                names.update(find(name))
            except UnknownOp as error:
                where = document.at(("rules", number, "match", "op", index))
                raise unknown_op(where, name, error, file.vocabulary) from error
        if rule.match.op:
            found[rule.id] = frozenset(names)
    return found


def _vocabulary_of(document: YamlDocument, file: RuleFile) -> Vocabulary:
    try:
        return load_vocabulary(str(file.vocabulary))
    except PolicyError as error:
        raise PolicyError(f"{document.at(('vocabulary',))}: {error.args[0]}", hint=error.hint) from error


def _validated(document: YamlDocument) -> RuleFile:
    try:
        return RuleFile.model_validate(document.data)
    except ValidationError as error:
        raise _located(document, error) from error


def _located(document: YamlDocument, error: ValidationError) -> PolicyError:
    # an unknown key is usually a misspelt one, and the reason why another is missing
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    unknown = first["type"] == "extra_forbidden"
    location = _without_branches(first["loc"], document.data)
    key = ".".join(str(part) for part in location)
    where = document.at(location, of_key=unknown)
    if unknown:
        return PolicyError(
            f"{where}: unknown key {describe(key)!r}", hint="see docs/rules.md for the known keys"
        )
    message = first["msg"].removeprefix("Value error, ")
    return PolicyError(f"{where}: {describe(key)}: {describe(message, 120)}", hint="see docs/rules.md")


def _without_branches(location: Sequence[Any], data: Any) -> tuple[Any, ...]:
    """Remove the union branches that pydantic adds to an error's path."""
    kept: list[Any] = []
    for position, part in enumerate(location):
        inside = isinstance(data, dict) and part in data
        if inside or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            data = data[part]
        elif position != len(location) - 1 or not isinstance(data, dict):
            continue  # a branch of a union
        kept.append(part)
    return tuple(kept)


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


class _Unmapped(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    why: str
    ops: tuple[str, ...]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    ops: dict[str, tuple[str, ...]]
    unmapped: tuple[_Unmapped, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A system's op names.

    Attributes:
        ops: the ATen names of each; empty for an op without a counterpart.
    """

    ops: dict[str, tuple[str, ...]]

    def expand(self, name: str) -> tuple[str, ...]:
        """List the ATen ops of a name in this vocabulary, or of an ATen name prefixed with ``aten::``.

        Raises:
            UnknownOp: neither knows it.
        """
        if "::" in name:
            return expand(name)
        if name in self.ops:
            return self.ops[name]
        close = difflib.get_close_matches(name, self.ops, n=1, cutoff=0.6)
        raise UnknownOp(name, close[0] if close else None)


def vocabulary_names() -> list[str]:
    """Return the names of the shipped vocabularies, sorted."""
    return sorted(path.stem for path in _directory().glob("*.yaml"))


@cache
def load_vocabulary(name: str) -> Vocabulary:
    """Return the vocabulary of that name.

    Raises:
        PolicyError: there is none, or its file is damaged.
    """
    path = _directory() / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(vocabulary_names())
        raise PolicyError(
            f"unknown vocabulary {describe(name)!r}", hint=f"one of: {known}; or leave it out for ATen"
        )
    document = read_yaml(path)
    try:
        file = _File.model_validate(document.data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PolicyError(f"{document.at(first['loc'])}: {first['msg']}") from error
    ops = {own: _aten(document, own, names) for own, names in file.ops.items()}
    return Vocabulary(ops | {name: () for group in file.unmapped for name in group.ops})


def _aten(document: YamlDocument, own: str, names: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for index, name in enumerate(names):
        try:
            found.extend(expand(name))
        except UnknownOp as error:
            where = document.at(("ops", own, index))
            raise PolicyError(
                f"{where}: ATen has no op {error}", hint=f"did you mean {error.near}?"
            ) from error
    return tuple(dict.fromkeys(found))


def _directory() -> Path:
    return rules_directory() / "vocabulary"
