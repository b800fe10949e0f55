"""Loads a policy by name or path, including the policies that it extends."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ampaudit.core.errors import PolicyError, did_you_mean
from ampaudit.core.untrusted import describe
from ampaudit.policy.aten_ops import UnknownOp, expand
from ampaudit.policy.decide import RuleSet
from ampaudit.policy.paths import policy_names, rules_directory
from ampaudit.policy.scaling import profile
from ampaudit.policy.schema import Rule, RuleFile
from ampaudit.policy.validation import check_rules, suspicious, unknown_op
from ampaudit.policy.vocabulary import Vocabulary, load_vocabulary
from ampaudit.policy.yamlfile import YamlDocument, read_yaml

__all__ = ["PLAIN_FP32", "Loaded", "load_file", "load_policy", "plain_fp32"]

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
