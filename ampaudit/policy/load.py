"""Loads a policy by name or path, including the policies that it extends."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ampaudit.core.errors import PolicyError, did_you_mean
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.untrusted import describe
from ampaudit.policy.aten_ops import UnknownOp, aten_arguments, expand
from ampaudit.policy.decide import RuleSet
from ampaudit.policy.matching import compiled
from ampaudit.policy.scaling import policy_names, profile, rules_directory
from ampaudit.policy.schema import Cast, Match, Rule, RuleFile, StrictModel, When
from ampaudit.policy.yamlfile import YamlDocument, read_yaml

__all__ = ["PLAIN_FP32", "Loaded", "load_file", "load_policy", "load_vocabulary", "plain_fp32"]

Ops = Mapping[str, frozenset[str]]
_BOTH = frozenset(LOW_PRECISION_NAMES)
_APPENDABLE = frozenset({"norm.Scalar", "norm.ScalarOpt_dim"})
_LOOKS_LIKE_REGEX = re.compile(r"[\\^$|]|\.\*|\.\+")
_SUFFIXES = (".yaml", ".yml")
_MAX_PARENTS = 8
# keys inherited from the first parent that sets them
_INHERITED = ("level", "autocast", "weights", "loss_scale", "defaults")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A policy with its inherited rules.

    Attributes:
        path: Path of the rule file.
        file: Content of the file, with inherited keys and rules.
        ops: ATen names by rule id.
        warnings: One line for each valid but suspicious construct.
    """

    path: Path
    file: RuleFile
    ops: dict[str, frozenset[str]]
    warnings: tuple[str, ...]

    @property
    def rules(self) -> RuleSet:
        """The policy as a rule set."""
        shipped = self.path.parent == rules_directory()
        return RuleSet(self.file, self.ops, location="" if shipped else str(self.path))


def load_policy(name_or_path: str | Path) -> RuleSet:
    """Load a policy with its inherited rules.

    Args:
        name_or_path: Name of a shipped policy, or path of a rule file.

    Returns:
        The policy.

    Raises:
        PolicyError: The name is unknown, or the file is unreadable or invalid (with line and column).
    """
    if not isinstance(name_or_path, str | Path):
        raise PolicyError(f"the policy is of type {type(name_or_path).__name__}")
    return load_file(str(name_or_path)).rules


def load_file(name_or_path: str) -> Loaded:
    """Load a policy with its path and warnings; raises the same errors as ``load_policy``."""
    return _load(_find(name_or_path, Path()), ())


PLAIN_FP32 = "fp32"  # name of the policy without casts


def plain_fp32(whole: frozenset[str] = frozenset()) -> RuleSet:
    """Return a policy without casts; composite ops in ``whole`` are not decomposed."""
    return RuleSet(RuleFile(name=PLAIN_FP32, title="no casts", level="calls"), {"": whole} if whole else None)


def _find(name_or_path: str, beside: Path) -> Path:
    if name_or_path in policy_names():  # a file in the current directory must not shadow it
        return rules_directory() / f"{name_or_path}.yaml"
    path = beside / name_or_path
    with contextlib.suppress(OSError):  # the path is too long
        if path.suffix in _SUFFIXES or path.is_file():
            return path
    suggestion = did_you_mean(name_or_path, policy_names())
    raise PolicyError(
        f"unknown policy {describe(name_or_path)!r}",
        hint=f"{suggestion}shipped policies: {', '.join(policy_names())}; or pass the path of a rule file",
    )


def _load(path: Path, children: tuple[Path, ...]) -> Loaded:
    return _read_shipped(path, ()) if path.parent == rules_directory() else _read(path, children)


def _read(path: Path, children: tuple[Path, ...]) -> Loaded:
    document = read_yaml(path)
    try:
        file = RuleFile.model_validate(document.data)
    except ValidationError as error:
        raise _locate(document, error) from error
    ops = _expand_rules(document, file)
    _check_rules(document, file, ops)
    if isinstance(file.loss_scale, str):
        profile(file.loss_scale, document.at(("loss_scale",)))
    parents = [_parent(document, index, name, children) for index, name in enumerate(file.extends)]
    return _with_inherited(document, file, ops, parents)


_read_shipped = cache(_read)  # each scan needs CUDA autocast's rules besides its own


def _parent(document: YamlDocument, index: int, name: str, children: tuple[Path, ...]) -> Loaded:
    place = ("extends", index)
    chain = (*children, document.path.resolve())
    try:
        path = _find(name, document.path.parent)
    except PolicyError as error:
        raise document.error(place, str(error.args[0]), error.hint) from error
    if path.resolve() in chain:
        names = " -> ".join(p.stem for p in (*chain[chain.index(path.resolve()) :], path))
        raise document.error(place, f"a policy extends itself: {describe(names)}", "remove one extends")
    if len(chain) > _MAX_PARENTS:
        raise document.error(place, f"more than {_MAX_PARENTS} policies on top of each other")
    return _load(path, chain)


def _with_inherited(
    document: YamlDocument, file: RuleFile, ops: dict[str, frozenset[str]], parents: list[Loaded]
) -> Loaded:
    rules: list[Rule] = list(file.rules)
    inherited: dict[str, Any] = {}
    dropped = set(file.drop)
    for parent in parents:
        fields = parent.file.model_fields_set
        for key in _INHERITED:
            if key in fields and key not in file.model_fields_set:
                inherited.setdefault(key, getattr(parent.file, key))
        ids = {rule.id for rule in rules}
        additions = [r for r in parent.file.rules if r.id not in ids and r.id not in file.drop]
        dropped -= {rule.id for rule in parent.file.rules}
        rules.extend(additions)
        ops = {rule.id: parent.ops[rule.id] for rule in additions if rule.id in parent.ops} | ops
    if dropped:
        name = min(dropped)
        problem = f"no inherited rule has the id {describe(name)!r}"
        raise document.error(("drop", file.drop.index(name)), problem, "see ampaudit rules show")
    joined = file.model_copy(update=inherited | {"rules": tuple(rules)})
    return Loaded(document.path, joined, ops, tuple(_warnings(document, file, ops, joined)))


def _expand_rules(document: YamlDocument, file: RuleFile) -> dict[str, frozenset[str]]:
    expand_name: Callable[[str], tuple[str, ...]] = expand
    if file.vocabulary:
        try:
            expand_name = load_vocabulary(file.vocabulary).expand
        except PolicyError as error:
            raise document.error(("vocabulary",), str(error.args[0]), error.hint) from error
    ops: dict[str, frozenset[str]] = {}
    for number, rule in enumerate(file.rules):
        names: set[str] = set()
        for index, name in enumerate(rule.match.op):
            try:
                names.update(expand_name(name))
            except UnknownOp as error:
                whose = f"the vocabulary {file.vocabulary!r}" if file.vocabulary else "ATen"
                problem = f"{whose} has no op {describe(name)!r}"
                suggestion = f"did you mean {error.near!r}? " if error.near else ""
                hint = f"{suggestion}an op of another library is written library::op"
                raise document.error(("rules", number, "match", "op", index), problem, hint) from error
        if rule.match.op:
            ops[rule.id] = frozenset(names)
    return ops


def _locate(document: YamlDocument, error: ValidationError) -> PolicyError:
    # an unknown key comes first: it is usually a misspelt one, and the reason why another is missing
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
    """Remove the names of union branches that pydantic adds to an error's path."""
    path: list[Any] = []
    for position, part in enumerate(location):
        inside = isinstance(data, dict) and part in data
        if inside or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            data = data[part]
        elif position != len(location) - 1 or not isinstance(data, dict):
            continue  # a branch of a union
        path.append(part)
    return tuple(path)


def _check_rules(document: YamlDocument, file: RuleFile, ops: Ops) -> None:
    """Reject duplicate ids, conflicts, rules that never match, and impossible conditions."""
    if file.weights.clip is not None and file.weights.storage != "lower":
        problem = "weights are clipped when they are stored: that needs 'storage: lower'"
        raise document.error(("weights", "clip"), problem)
    ids: set[str] = set()
    for number, rule in enumerate(file.rules):
        if rule.id in ids:
            problem = f"duplicate rule id {describe(rule.id)!r}"
            raise document.error(("rules", number, "id"), problem, "rename one")
        ids.add(rule.id)
        for key, problem in _problems(rule, ops.get(rule.id), file.level):
            raise document.error(("rules", number, *key), problem, "see docs/rules.md")
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
            problem = f"{describe(pattern)!r} is not a pattern of RE2: {describe(error)}"
            yield ("match", "layer_regex"), problem
    for name, specifier in when.versions.items():
        if not _is_specifier(specifier):
            problem = f"{describe(specifier)!r} is not a version condition such as '>=2.1,<3'"
            yield ("when", "versions", name), problem
    yield from _argument_problems(rule, ops)


def _argument_problems(rule: Rule, ops: frozenset[str] | None) -> Iterator[tuple[tuple[str, ...], str]]:
    if ops is None:
        return
    signatures = {name: aten_arguments(name) for name in ops}
    names = {arg for arguments in signatures.values() if arguments for arg in arguments}
    if names:
        for place, tested in ((("when",), rule.when.arguments), ((), rule.arguments)):
            for name in set(tested) - names:
                known = f"they have {describe(', '.join(sorted(names)), 120)}"
                problem = f"no op of this rule has an argument {describe(name)!r}"
                yield (*place, "arguments", name), f"{problem}; {did_you_mean(name, names).strip() or known}"
    if rule.cast is Cast.SET_DTYPE:
        lacking = [op for op, arguments in signatures.items() if arguments and "dtype" not in arguments]
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
    """Reject rules about ops that an earlier unconditional rule already decides."""
    decided: dict[tuple[str, str], Rule] = {}
    everything: dict[str, Rule] = {}
    for number, rule in enumerate(file.rules):
        if rule.measured is not measured:
            continue
        formats = frozenset(rule.when.dtype) or _BOTH
        over = [everything[form] for form in formats if form in everything]
        if len(over) == len(formats):
            raise _never_matches(document, number, rule, over[0])
        mine = ops.get(rule.id)
        if mine is None:
            if rule.match == Match() and _is_unconditional(rule.when):
                everything |= dict.fromkeys(formats, rule)
            continue
        deciders = {pair: decided[pair] for op in mine for form in formats if (pair := (op, form)) in decided}
        for (op, _), earlier in sorted(deciders.items(), key=lambda item: item[0]):
            if earlier.cast is not rule.cast:
                other = describe(earlier.id)
                problem = f"conflict: {op} is {rule.cast} here and {earlier.cast} in rule {other!r}"
                hint = "remove it from one of them, or give the first a condition"
                raise document.error(("rules", number, "match", "op"), problem, hint)
        if mine and len(deciders) == len(mine) * len(formats):
            raise _never_matches(document, number, rule, next(iter(deciders.values())))
        if _is_unconditional(rule.when) and rule.match.model_fields_set <= {"op"}:
            for op in mine:
                decided |= {(op, form): rule for form in formats if (op, form) not in decided}


def _is_unconditional(when: When) -> bool:
    return when.model_fields_set <= {"dtype"}


def _never_matches(document: YamlDocument, number: int, rule: Rule, earlier: Rule) -> PolicyError:
    name, other = describe(rule.id), describe(earlier.id)
    problem = f"rule {name!r} can never match: rule {other!r} above decides all of its ops"
    return document.error(("rules", number, "match"), problem, "move it up, or remove it")


def _warnings(document: YamlDocument, file: RuleFile, ops: Ops, joined: RuleFile) -> Iterator[str]:
    """Yield a one-line warning for each construct that is valid but probably a mistake."""
    for number, rule in enumerate(file.rules):
        place = document.at(("rules", number, "match"))
        for glob in rule.match.layer:
            if _LOOKS_LIKE_REGEX.search(glob):
                name = describe(glob)
                yield f"{place}: the glob {name!r} looks like a regular expression; use layer_regex for one"
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


class _Unmapped(StrictModel):
    why: str
    ops: tuple[str, ...]


class _File(StrictModel):
    name: str
    title: str
    ops: dict[str, tuple[str, ...]]
    unmapped: tuple[_Unmapped, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The op names of another system.

    Attributes:
        ops: ATen names by op; empty for an op without a counterpart.
    """

    ops: dict[str, tuple[str, ...]]

    def expand(self, name: str) -> tuple[str, ...]:
        """Expand a name in this vocabulary, or an ATen name prefixed with ``aten::``, to ATen ops.

        Raises:
            UnknownOp: The name is in neither.
        """
        if "::" in name:
            return expand(name)
        if name in self.ops:
            return self.ops[name]
        close = difflib.get_close_matches(name, self.ops, n=1, cutoff=0.6)
        raise UnknownOp(name, close[0] if close else None)


@cache
def load_vocabulary(name: str) -> Vocabulary:
    """Load a shipped vocabulary.

    Raises:
        PolicyError: The name is unknown, or the file is damaged.
    """
    path = rules_directory() / "vocabulary" / f"{name}.yaml"
    if not path.is_file():
        choices = ", ".join(sorted(path.stem for path in path.parent.glob("*.yaml")))
        raise PolicyError(
            f"unknown vocabulary {describe(name)!r}", hint=f"one of: {choices}; or leave it out for ATen"
        )
    document = read_yaml(path)
    try:
        file = _File.model_validate(document.data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise document.error(first["loc"], first["msg"]) from error
    ops = {entry: _aten_ops(document, entry, names) for entry, names in file.ops.items()}
    return Vocabulary(ops | {name: () for group in file.unmapped for name in group.ops})


def _aten_ops(document: YamlDocument, entry: str, names: tuple[str, ...]) -> tuple[str, ...]:
    ops: list[str] = []
    for index, name in enumerate(names):
        try:
            ops.extend(expand(name))
        except UnknownOp as error:
            hint = f"did you mean {error.near}?"
            raise document.error(("ops", entry, index), f"ATen has no op {error}", hint) from error
    return tuple(dict.fromkeys(ops))
