"""Loads a policy by name or path, including the policies that it extends."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ampaudit.core.errors import PolicyError, did_you_mean, first_line
from ampaudit.core.formats import BFLOAT16, LOW_PRECISION_NAMES, NumberFormat
from ampaudit.core.untrusted import describe, describe_path, read_bounded
from ampaudit.policy.decide import RuleSet, compiled
from ampaudit.policy.schema import (
    Cast,
    LossScale,
    Match,
    Rule,
    RuleFile,
    StrictModel,
    UnknownOp,
    When,
    aten_arguments,
    expand,
)

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
# including base 60, which PyYAML converts in quadratic time
_LONG_NUMBER = re.compile(r"[-+.]?[0-9][0-9a-fA-FxXob_:.+-]{100}")
# libyaml is ten times faster, but missing from some builds of PyYAML
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}
_WORD = "tag:yaml.org,2002:str"
Ops = Mapping[str, frozenset[str]]
_BOTH = frozenset(LOW_PRECISION_NAMES)
_APPENDABLE = frozenset({"norm.Scalar", "norm.ScalarOpt_dim"})
_LOOKS_LIKE_REGEX = re.compile(r"[\\^$|]|\.\*|\.\+")
_SUFFIXES = (".yaml", ".yml")
_MAX_PARENTS = 8
_STRING_ERRORS = ("string_type", "literal_error")  # of pydantic, for a value that is not one of the words
_SHOULD_BE = "Input should be "
_PYTHON_TYPE = re.compile(r"a valid (?:(tuple)|dictionary(?: or instance of \w+)?)")
# keys inherited from the first parent that sets them
_INHERITED = ("level", "autocast", "weights", "loss_scale", "defaults")


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy with its inherited rules."""

    path: Path  # of the rule file
    file: RuleFile  # with inherited keys and rules
    ops: dict[str, frozenset[str]]  # ATen names by rule id
    warnings: tuple[str, ...]  # one line for each valid but suspicious construct

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


def load_file(name_or_path: str) -> LoadedPolicy:
    """Load a policy with its path and warnings; it raises the same errors as ``load_policy``."""
    return _load(_find(name_or_path, Path()), (), {})


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


def _load(path: Path, children: tuple[Path, ...], loaded: dict[Path, LoadedPolicy]) -> LoadedPolicy:
    if path.parent == rules_directory():
        return _read_shipped(path)
    place = path.resolve()
    if place not in loaded:  # policies may share parents, and these theirs
        loaded[place] = _read(path, children, loaded)
    return loaded[place]


def _read(path: Path, children: tuple[Path, ...], loaded: dict[Path, LoadedPolicy]) -> LoadedPolicy:
    document = read_yaml(path)
    try:
        file = RuleFile.model_validate(document.data)
    except ValidationError as error:
        raise _locate(document, error) from error
    ops = _expand_rules(document, file)
    _check_rules(document, file, ops)
    if isinstance(file.loss_scale, str):
        profile(file.loss_scale, document.at(("loss_scale",)))
    parents = [_parent(document, index, name, children, loaded) for index, name in enumerate(file.extends)]
    return _with_inherited(document, file, ops, parents)


@cache  # each scan needs CUDA autocast's rules besides its own
def _read_shipped(path: Path) -> LoadedPolicy:
    return _read(path, (), {})


def _parent(
    document: YamlDocument,
    index: int,
    name: str,
    children: tuple[Path, ...],
    loaded: dict[Path, LoadedPolicy],
) -> LoadedPolicy:
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
    if not path.is_file():
        raise document.error(place, f"there is no file {describe_path(path)}", "check the path")
    return _load(path, chain, loaded)


def _with_inherited(
    document: YamlDocument, file: RuleFile, ops: dict[str, frozenset[str]], parents: list[LoadedPolicy]
) -> LoadedPolicy:
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
        hint = "'ampaudit rules show NAME' prints the rules of a policy"
        raise document.error(("drop", file.drop.index(name)), problem, hint)
    joined = file.model_copy(update=inherited | {"rules": tuple(rules)})
    return LoadedPolicy(document.path, joined, ops, tuple(_warnings(document, file, ops, joined)))


def _expand_rules(document: YamlDocument, file: RuleFile) -> dict[str, frozenset[str]]:
    expand_name: Callable[[str], tuple[str, ...]] = expand
    if file.vocabulary:
        try:
            expand_name = partial(expand_in, load_vocabulary(file.vocabulary))
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
    every = error.errors(include_url=False)
    # for a mapping, leave out the errors of union branches that take words
    fitting = [e for e in every if e["type"] not in _STRING_ERRORS or not isinstance(e["input"], dict)]
    errors = fitting or every
    # an unknown key comes first, since it is usually a misspelling, and another key is missing because of it
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    unknown = first["type"] == "extra_forbidden"
    location = _location(first, document.data)
    key = ".".join(str(part) for part in location)
    where = document.at(location, of_key=unknown)
    if unknown:
        return PolicyError(
            f"{where}: unknown key {describe(key)!r}", hint="see docs/rules.md for the known keys"
        )
    same = (e["msg"] for e in errors if _location(e, document.data) == location)
    in_yaml = (_PYTHON_TYPE.sub(lambda kind: "a list" if kind[1] else "a mapping", text) for text in same)
    message, *others = dict.fromkeys(in_yaml)
    text = " or ".join([message.removeprefix("Value error, "), *(o.removeprefix(_SHOULD_BE) for o in others)])
    return PolicyError(f"{where}: {describe(key)}: {describe(text, 200)}", hint="see docs/rules.md")


def _location(error: ErrorDetails, data: Any) -> tuple[Any, ...]:
    """Return the path of an error, without the names of union branches, which pydantic adds."""
    path: list[Any] = []
    for position, part in enumerate(error["loc"]):
        inside = isinstance(data, dict) and part in data
        if inside or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            data = data[part]
        elif error["type"] not in ("missing", "extra_forbidden") or position != len(error["loc"]) - 1:
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
    """Reject rules for ops that an earlier unconditional rule decides."""
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


class _VocabularyFile(StrictModel):
    name: str
    title: str
    ops: dict[str, tuple[str, ...]]
    unmapped: tuple[_Unmapped, ...] = ()


def expand_in(vocabulary: Mapping[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    """Expand a name of a vocabulary, or a name with a library such as ``aten::add``, to ops.

    Raises:
        UnknownOp: The name is unknown.
    """
    if "::" in name:
        return expand(name)
    if name in vocabulary:
        return vocabulary[name]
    close = difflib.get_close_matches(name, vocabulary, n=1, cutoff=0.6)
    raise UnknownOp(name, close[0] if close else None)


@cache
def load_vocabulary(name: str) -> Mapping[str, tuple[str, ...]]:
    """Return the ATen names of each op in a shipped vocabulary; empty for an op without a counterpart.

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
        file = _VocabularyFile.model_validate(document.data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise document.error(first["loc"], first["msg"]) from error
    ops = {entry: _aten_ops(document, entry, names) for entry, names in file.ops.items()}
    return ops | {name: () for group in file.unmapped for name in group.ops}


def _aten_ops(document: YamlDocument, entry: str, names: tuple[str, ...]) -> tuple[str, ...]:
    ops: list[str] = []
    for index, name in enumerate(names):
        try:
            ops.extend(expand(name))
        except UnknownOp as error:
            hint = f"did you mean {error.near}?"
            raise document.error(("ops", entry, index), f"ATen has no op {error}", hint) from error
    return tuple(dict.fromkeys(ops))


class LossScaleProfile(StrictModel):
    """A system's loss scale, and the source of its constants."""

    title: str
    source: str
    scale: LossScale


@dataclass(frozen=True, slots=True)
class StartingScale:
    """The initial loss scale of training."""

    value: float  # factor of the loss
    dynamic: bool  # whether it is reduced when a gradient overflows
    source: str  # what determines it
    least: float = 0.0  # lower limit; 0 if unlimited


def loss_scale_for(loss_scale: str | LossScale, number_format: NumberFormat) -> tuple[LossScale, str]:
    """Return a policy's loss scale for a format, and a description of what determines it.

    The loss is never scaled in bfloat16, which has the range of float32.
    """
    if number_format is BFLOAT16:
        return profile("none").scale, "no loss scaling in bfloat16"
    if isinstance(loss_scale, LossScale):
        return loss_scale, "the policy"
    shipped = profile(loss_scale)
    return shipped.scale, shipped.title


def starting_scale(loss_scale: str | LossScale, number_format: NumberFormat) -> StartingScale:
    """Return the initial loss scale of a policy."""
    scale, source = loss_scale_for(loss_scale, number_format)
    return StartingScale(scale.start, scale.kind == "dynamic", source, scale.min or 0.0)


@cache
def profiles() -> dict[str, LossScaleProfile]:
    """Return every shipped profile by name.

    Raises:
        PolicyError: The shipped file is damaged.
    """
    document = read_yaml(rules_directory() / "profiles" / "loss-scale.yaml")
    try:
        return {name: LossScaleProfile.model_validate(data) for name, data in document.data.items()}
    except ValidationError as error:
        raise PolicyError(f"{document.path}: {error.errors(include_url=False)[0]['msg']}") from error


def profile(name: str, where: str = "") -> LossScaleProfile:
    """Return a profile by name; ``where`` is the position of the name in a file, for the error.

    Raises:
        PolicyError: The name is unknown.
    """
    name = str(name)
    if name in profiles():
        return profiles()[name]
    suggestion = did_you_mean(name, profiles())
    prefix = f"{where}: " if where else ""
    raise PolicyError(
        f"{prefix}unknown loss-scale profile {describe(name)!r}",
        hint=f"{suggestion}one of: {', '.join(profiles())}",
    )


@cache
def rules_directory() -> Path:
    """Return the directory of the shipped rule files, in the wheel or beside the package.

    Raises:
        PolicyError: The installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "_rules", package.parent / "rules"):
        if (candidate / "torch-cuda.yaml").is_file():
            return candidate
    raise PolicyError("the shipped rule files are missing", hint="install ampaudit again")


def policy_names() -> list[str]:
    """Return the names of the shipped policies, sorted."""
    return sorted(path.stem for path in rules_directory().glob("*.yaml"))


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A YAML mapping with the positions of its values."""

    path: Path
    data: dict[str, Any]
    root: yaml.Node

    def at(self, location: Sequence[Any], of_key: bool = False) -> str:
        """Return ``file:line:column`` (from 1) of the value at a path, or of its key."""
        node: yaml.Node = self.root
        mark = node.start_mark
        for part in location:
            if isinstance(node, yaml.MappingNode):
                entry = next((pair for pair in node.value if pair[0].value == part), None)
                if entry is None:
                    break
                mark, node = entry[0].start_mark if of_key else entry[1].start_mark, entry[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                mark = node.start_mark
            else:
                break
        return _where(self.path, mark)

    def error(self, location: Sequence[Any], problem: str, hint: str | None = None) -> PolicyError:
        """Return an error about the value at a path."""
        return PolicyError(f"{self.at(location)}: {problem}", hint=hint)


class _Constructor(yaml.constructor.SafeConstructor):
    """Builds null, booleans, numbers and strings; values of other YAML types, such as dates, stay strings."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node, or raise an error with its position."""
        if isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
            return node.value
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            problem = first_line(error)
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error


def read_yaml(path: Path) -> YamlDocument:
    """Read a YAML file that holds a mapping.

    Raises:
        PolicyError: The file is unreadable, too large, nested too deeply, not a YAML mapping, or has aliases,
            tags or duplicate keys; with line and column.
    """
    text = _text_of(path)
    if unprintable := yaml.reader.Reader.NON_PRINTABLE.search(text):
        before = text[: unprintable.start()].split("\n")
        where = f"{describe_path(path)}:{len(before)}:{len(before[-1]) + 1}"
        raise PolicyError(f"{where}: a control character", hint="save the file as plain UTF-8")
    try:
        _reject_unsafe(text, path)
        root = yaml.compose(text, Loader=_Loader)
        if not isinstance(root, yaml.MappingNode):
            raise PolicyError(
                f"{_where(path, None)}: a rule file is a mapping", hint="start with 'name:' and 'rules:'"
            )
        _reject_duplicate_keys(root, path)
        return YamlDocument(path, _Constructor().construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        where = _where(path, error.problem_mark) if error.problem_mark else describe_path(path)
        problem = describe(error.problem or "a mistake here")
        hint = "indent with spaces" if "\\t" in problem else "check indentation"
        hint = "quote it" if isinstance(error, yaml.constructor.ConstructorError) else hint
        raise PolicyError(f"{where}: not valid YAML: {problem}", hint=hint) from error
    except (yaml.YAMLError, ValueError) as error:
        raise PolicyError(
            f"{describe_path(path)}: not valid YAML: {describe(first_line(error))}",
            hint="save the file as plain UTF-8",
        ) from error


def _text_of(path: Path) -> str:
    try:
        return read_bounded(path, MAX_BYTES, PolicyError).decode("utf-8")
    except PolicyError as error:
        raise PolicyError(f"cannot read rule file {error.args[0]}", hint=error.hint) from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{describe_path(path)}: not UTF-8 text", hint="save the file as UTF-8") from error


def _reject_unsafe(text: str, path: Path) -> None:
    """Reject aliases, tags, huge numbers and deep nesting before any value is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            problem, hint = "YAML aliases are not allowed in a rule file", "write the value out"
        elif isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) not in (None, "!"):
            problem = "YAML tags are not allowed in a rule file"
            hint = "a rule file is plain data: remove the tag"
        elif isinstance(event, yaml.ScalarEvent) and _LONG_NUMBER.match(event.value):
            problem, hint = "a number of more than 100 digits", "quote it if it is text"
        elif depth > MAX_DEPTH:
            problem, hint = "nested too deeply", "see docs/rules.md"
        else:
            continue
        raise PolicyError(f"{_where(path, event.start_mark)}: {problem}", hint=hint)


def _reject_duplicate_keys(root: yaml.Node, path: Path) -> None:
    """Reject duplicate keys, of which YAML would silently keep the last."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag != _WORD:
                    raise PolicyError(
                        f"{_where(path, key.start_mark)}: a key must be a word", hint="quote it"
                    )
                if key.value in keys:
                    raise PolicyError(
                        f"{_where(path, key.start_mark)}: key {describe(key.value)!r} is given twice",
                        hint="merge them",
                    )
                keys.add(key.value)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)


def _where(path: Path, mark: Any) -> str:
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    return f"{describe_path(path)}:{line}:{column}"
