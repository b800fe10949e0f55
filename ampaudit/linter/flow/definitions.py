"""Functions and classes that a script defines, and what is made of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

__all__ = [
    "BoundMethod",
    "Class",
    "ClassInfo",
    "Function",
    "FunctionInfo",
    "Instance",
    "function_of_lambda",
]


@dataclass(frozen=True, slots=True, eq=False)
class FunctionInfo:
    """A function or method of the file."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    owner: ClassInfo | None
    relevant: bool  # whether anything in it matters

    @property
    def is_static(self) -> bool:
        """Whether it is a static method."""
        return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in self.node.decorator_list)


def function_of_lambda(node: ast.Lambda, relevant: bool) -> FunctionInfo:
    """Return a lambda as a function."""
    returned = ast.copy_location(ast.Return(value=node.body), node.body)
    function = ast.FunctionDef(name="<lambda>", args=node.args, body=[returned], decorator_list=[])
    return FunctionInfo(ast.copy_location(function, node), None, relevant)


@dataclass(slots=True, eq=False)
class ClassInfo:
    """A class; ``bases`` are the dotted names of its base classes, ``base`` the first that is followed."""

    node: ast.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, FunctionInfo]
    base: ClassInfo | None = None

    @property
    def fields(self) -> list[ast.AnnAssign]:
        """The annotated fields, those of base classes first, if it has no constructor of its own."""
        if self.method("__init__") is not None:
            return []
        annotated = [node for node in self.node.body if isinstance(node, ast.AnnAssign)]
        return [*(self.base.fields if self.base is not None else ()), *annotated]

    @property
    def ancestry(self) -> list[ClassInfo]:
        """The class and its base classes that are followed."""
        return [self, *(self.base.ancestry if self.base is not None else ())]

    def method(self, name: str) -> FunctionInfo | None:
        """Return a method by name, also from base classes that are followed."""
        if name in self.methods:
            return self.methods[name]
        return self.base.method(name) if self.base is not None else None

    def derives(self, *endings: str) -> bool:
        """Return whether the last component of a base class's name is one of some names."""
        directly = any(base.rpartition(".")[2] in endings for base in self.bases)
        return directly or (self.base is not None and self.base.derives(*endings))


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the file, with the frame that defines it."""

    info: FunctionInfo
    frame: int


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the file."""

    info: ClassInfo


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance of a class of the file."""

    key: str
    info: ClassInfo


@dataclass(frozen=True, slots=True)
class BoundMethod:
    """A method of an instance."""

    owner: Instance
    info: FunctionInfo
