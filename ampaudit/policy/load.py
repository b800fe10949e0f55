"""Finds a policy by name or path, reads it without running anything, and points at its mistakes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ampaudit.errors import PolicyError
from ampaudit.policy.decide import RuleSet
from ampaudit.policy.schema import RuleFile

__all__ = ["load_policy", "plain_fp32", "policy_names", "rules_directory"]

MAX_BYTES = 1 << 20
_SUFFIXES = (".yaml", ".yml")


def rules_directory() -> Path:
    """Where the shipped rule files are: inside the wheel, or beside the package in a checkout.

    Raises:
        PolicyError: neither place has them; the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "_rules", package.parent / "rules"):
        if (candidate / "torch-cuda.yaml").is_file():
            return candidate
    raise PolicyError("the shipped rule files are missing", hint="install ampaudit again")


def policy_names() -> list[str]:
    """Names of the shipped policies, sorted."""
    return sorted(path.stem for path in rules_directory().glob("*.yaml"))


def load_policy(name_or_path: str) -> RuleSet:
    """The policy of that name, or from that rule file.

    Raises:
        PolicyError: unknown name, unreadable file, or a mistake in it (with line and column).
    """
    path = Path(name_or_path)
    if path.suffix in _SUFFIXES or path.is_file():
        return RuleSet(_read(path))
    if name_or_path in policy_names():
        return _shipped(name_or_path)
    near = difflib.get_close_matches(name_or_path, policy_names(), n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise PolicyError(
        f"unknown policy {name_or_path!r}",
        hint=f"{meant}shipped policies: {', '.join(policy_names())}; or pass the path of a rule file",
    )


@cache
def _shipped(name: str) -> RuleSet:
    """Rule sets are never changed, and a scan needs the one of CUDA autocast beside its own."""
    return RuleSet(_read(rules_directory() / f"{name}.yaml"))


def plain_fp32() -> RuleSet:
    """No casts at all: what the model does as it is."""
    return RuleSet(RuleFile(name="fp32", title="no casts", autocast=False))


def _read(path: Path) -> RuleFile:
    text = _text_of(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_aliases(text, path)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise PolicyError(f"{where}: not valid YAML: {error.problem}", hint="check indentation") from error
    except (yaml.YAMLError, ValueError) as error:
        raise PolicyError(f"{path}: not valid YAML: {error}", hint="save the file as plain UTF-8") from error
    if not isinstance(data, dict):
        raise PolicyError(f"{path}:1:1: a rule file is a mapping", hint="start with 'name:' and 'rules:'")
    try:
        file = RuleFile.model_validate(data)
    except ValidationError as error:
        raise _located(path, root, error) from error
    _refuse_duplicates(path, root, file)
    return file


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PolicyError(f"{path}: larger than {MAX_BYTES} bytes", hint="split the policy")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"cannot read rule file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: not UTF-8 text", hint="save the file as UTF-8") from error


def _refuse_aliases(text: str, path: Path) -> None:
    """Aliases are how a small YAML file becomes a huge value; a rule file does not need them."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            line, column = _of_mark(event.start_mark)
            raise PolicyError(
                f"{path}:{line}:{column}: YAML aliases are not allowed in a rule file",
                hint="write the value out",
            )


def _refuse_duplicates(path: Path, root: yaml.Node | None, file: RuleFile) -> None:
    seen: set[str] = set()
    for index, rule in enumerate(file.rules):
        if rule.id in seen:
            line, column = _position(root, ("rules", index, "id"))
            raise PolicyError(f"{path}:{line}:{column}: duplicate rule id {rule.id!r}", hint="rename one")
        seen.add(rule.id)


def _located(path: Path, root: yaml.Node | None, error: ValidationError) -> PolicyError:
    # an unknown key is usually a misspelt one, and the reason why another is missing
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    line, column = _position(root, first["loc"], of_key=first["type"] == "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return PolicyError(
            f"{path}:{line}:{column}: unknown key {key!r}", hint="see docs/rules.md for the known keys"
        )
    return PolicyError(f"{path}:{line}:{column}: {key}: {first['msg']}", hint="see docs/rules.md")


def _position(root: yaml.Node | None, location: Sequence[Any], of_key: bool = False) -> tuple[int, int]:
    """Line and column, from 1, of the deepest value on the path, or of its key."""
    node, mark = root, root.start_mark if root else None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == part), None)
            if found is None:
                break
            mark, node = found[0].start_mark if of_key else found[1].start_mark, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            mark = node.start_mark
        else:
            break
    return _of_mark(mark)


def _of_mark(mark: Any) -> tuple[int, int]:
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)
