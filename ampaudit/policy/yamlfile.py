"""Reads untrusted YAML: plain data of bounded size and depth, with the position of each value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ampaudit.core.errors import PolicyError, first_line
from ampaudit.core.untrusted import describe, describe_path, read_bounded

__all__ = ["YamlDocument", "read_yaml"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
# including base 60, which PyYAML converts in quadratic time
_LONG_NUMBER = re.compile(r"[-+.]?[0-9][0-9a-fA-FxXob_:.+-]{100}")
# libyaml is ten times faster, but missing from some builds of PyYAML
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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


def read_yaml(path: Path) -> YamlDocument:
    """Read a YAML file that holds a mapping.

    Raises:
        PolicyError: The file is unreadable, too large, nested too deeply, not a YAML mapping, or has aliases,
            tags or duplicate keys; with line and column.
    """
    text = _text_of(path)
    try:
        _reject_unsafe(text, path)
        root = yaml.compose(text, Loader=_Loader)
        if not isinstance(root, yaml.MappingNode):
            raise PolicyError(
                f"{_where(path, None)}: a rule file is a mapping", hint="start with 'name:' and 'rules:'"
            )
        _reject_duplicate_keys(root, path)
        return YamlDocument(path, yaml.constructor.SafeConstructor().construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        where = _where(path, error.problem_mark) if error.problem_mark else describe_path(path)
        problem = describe(error.problem or "a mistake here")
        hint = "indent with spaces" if "\\t" in problem else "check indentation"
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
            problem, hint = "a number of more than 100 digits", "quote it if it is none"
        elif depth > MAX_DEPTH:
            problem, hint = "nested too deeply", "see docs/rules.md"
        else:
            continue
        raise PolicyError(f"{_where(path, event.start_mark)}: {problem}", hint=hint)


def _reject_duplicate_keys(root: yaml.Node, path: Path) -> None:
    """Reject duplicate keys, where YAML would silently keep the last."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
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
