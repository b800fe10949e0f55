"""Maps other systems' op names to ATen ops."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ampaudit.core.errors import PolicyError
from ampaudit.core.untrusted import describe
from ampaudit.policy.aten_ops import UnknownOp, expand
from ampaudit.policy.paths import rules_directory
from ampaudit.policy.yamlfile import YamlDocument, read_yaml

__all__ = ["Vocabulary", "load_vocabulary", "vocabulary_names"]


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
