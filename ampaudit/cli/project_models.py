"""Finds the models that a project defines, and how it builds and calls them, without running its code."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import read_bounded
from ampaudit.linter.flow.syntax import keyword_value, simple_name
from ampaudit.linter.source_text import MAX_SOURCE_BYTES, Unreadable, decode

_BASES = ("Module", "LightningModule", "PreTrainedModel")
_RANDOM = ("randn", "rand", "zeros", "ones", "randint", "empty")
_SIDE = 64  # of an image of unknown size
# by first layer: sizes of its inputs, with None for the size that an argument determines, and that argument
_FIRST = {
    "Conv1d": ((1, None, 1000), "in_channels"),
    "Conv2d": ((1, None, _SIDE, _SIDE), "in_channels"),
    "Conv3d": ((1, None, 8, _SIDE, _SIDE), "in_channels"),
    "Linear": ((1, None), "in_features"),
    "LSTM": ((1, 16, None), "input_size"),
    "GRU": ((1, 16, None), "input_size"),
}


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A model class, and how the project uses it."""

    name: str
    file: Path
    line: int
    required: tuple[str, ...]  # names of the required constructor arguments
    arguments: str | None = None  # literal arguments of a call in the project; None without such a call
    called_at: str = ""  # file and line of that call
    inputs: str = ""  # expression that creates inputs
    reason: str = ""  # reason for these inputs
    trains: int = 0  # line of a backward pass that importing its file would run; 0 without one


@dataclass(slots=True)
class _File:
    """A parsed file, with its constants."""

    path: Path
    tree: ast.Module
    constants: dict[str, Any] = field(default_factory=dict)


def models_of(paths: Iterable[Path]) -> list[ModelClass]:
    """Return the models of a project, the likeliest to be audited first.

    These are the classes that no other model contains: first those that the project builds with literal
    arguments, then those that need none, then the rest.
    """
    files = list(_parsed(paths))
    classes = {
        node.name: (file, node) for file in files for node in file.tree.body if isinstance(node, ast.ClassDef)
    }
    models = _models_among(classes)
    contained = {
        called
        for _, node in models.values()
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and (called := simple_name(call.func)) in models and called != node.name
    }
    candidates = [_model(file, node, files) for name, (file, node) in models.items() if name not in contained]
    return sorted(candidates, key=lambda model: (model.arguments is None, bool(model.required)))


def _parsed(paths: Iterable[Path]) -> Iterator[_File]:
    for path in paths:
        try:
            file = _File(path, ast.parse(decode(read_bounded(path, MAX_SOURCE_BYTES, InputError))[0]))
        except (InputError, Unreadable, SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # lint reports it
        for node in file.tree.body:
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                value = _literal(node.value, file.constants)
                if value is not None:
                    file.constants[node.targets[0].id] = value
        yield file


def _models_among(classes: dict[str, tuple[_File, ast.ClassDef]]) -> dict[str, tuple[_File, ast.ClassDef]]:
    """Return the classes that derive from a class of ``nn`` or a known base, directly or through others."""
    model_names = set(_BASES)
    while True:
        models = {
            name: pair
            for name, pair in classes.items()
            if any(
                simple_name(base) in model_names
                or (isinstance(base, ast.Attribute) and simple_name(base.value) == "nn")
                for base in pair[1].bases
            )
        }
        if models.keys() <= model_names:
            return models
        model_names |= models.keys()


def _model(file: _File, node: ast.ClassDef, files: list[_File]) -> ModelClass:
    constructor = _method(node, "__init__")
    parameters = _parameters(constructor)
    required = tuple(name for name, default in parameters.items() if default is None)
    model = ModelClass(node.name, file.path, node.lineno, required, trains=_training_line(file.tree))
    values = {
        name: _literal(default, file.constants) for name, default in parameters.items() if default is not None
    }
    for other in files:
        for call in ast.walk(other.tree):
            if isinstance(call, ast.Call) and simple_name(call.func) == node.name and model.arguments is None:
                arguments = _arguments(call, other.constants)
                if arguments is not None:
                    place = f"{other.path.as_posix()}:{call.lineno}"
                    model = replace(model, arguments=_argument_list(arguments), called_at=place)
                    positional = list(_parameters(constructor, keywords=False))
                    values |= dict(zip(positional, arguments[0], strict=False)) | arguments[1]
    inputs, reason = _inputs(constructor, values, file.constants, files)
    needed = [name for name, default in _parameters(_method(node, "forward")).items() if default is None]
    if others := needed[1:]:
        inputs, reason = f"{inputs}{', ...' * len(others)}", f"{reason}; fill in {', '.join(others)}"
    return replace(model, inputs=inputs, reason=reason)


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == name), None)


def _parameters(method: ast.FunctionDef | None, *, keywords: bool = True) -> dict[str, ast.expr | None]:
    """Return the parameters of a method except self, with their defaults; ``None`` for one without.

    Without ``keywords``, those that can only be passed by name are left out.
    """
    if method is None:
        return {}
    arguments = method.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    pairs = [*zip(positional, defaults, strict=True)][1:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if keywords else ()
    return {argument.arg: default for argument, default in pairs}


def _arguments(call: ast.Call, constants: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments of a call, if all are literals or constants of the file."""
    args = [_literal(argument, constants) for argument in call.args]
    kwargs = {word.arg or "": _literal(word.value, constants) for word in call.keywords}
    return None if None in args or None in kwargs.values() or "" in kwargs else (args, kwargs)


def _argument_list(arguments: tuple[list[Any], dict[str, Any]]) -> str:
    return ", ".join(
        [*map(repr, arguments[0]), *(f"{name}={value!r}" for name, value in arguments[1].items())]
    )


def _inputs(
    constructor: ast.FunctionDef | None,
    values: dict[str, Any],
    constants: dict[str, Any],
    files: list[_File],
) -> tuple[str, str]:
    """Return an expression for a model's inputs, and the reason for it."""
    for file in files:
        for call in _calls_of_models(file):
            tensor = _random_call(call.args[0], file)
            arguments = _arguments(tensor, file.constants) if tensor is not None else None
            if tensor is not None and arguments is not None:
                place = f"{file.path.as_posix()}:{tensor.lineno}"
                return f"torch.{simple_name(tensor.func)}({_argument_list(arguments)})", f"as in {place}"
    for layer in ast.walk(constructor) if constructor is not None else ():
        name = simple_name(layer.func) if isinstance(layer, ast.Call) else ""
        if not isinstance(layer, ast.Call) or name not in (*_FIRST, "Embedding"):
            continue
        keyword = _FIRST[name][1] if name in _FIRST else "num_embeddings"
        size_node = layer.args[0] if layer.args else keyword_value(layer, keyword)
        size = _literal(size_node, constants | values) if size_node is not None else None
        if isinstance(size, int) and size > 0:
            reason = f"what its first layer, nn.{name}, takes; other sizes are a guess"
            if name == "Embedding":
                return f"torch.randint(0, {size}, (1, 16))", reason
            return f"torch.randn{tuple(size if n is None else n for n in _FIRST[name][0])}", reason
    return "torch.randn(1, 16)", "a guess: nothing in the code says what it takes"


def _calls_of_models(file: _File) -> Iterator[ast.Call]:
    """Yield the calls of anything named ``model`` or ``net``, with one argument."""
    for call in ast.walk(file.tree):
        if isinstance(call, ast.Call) and len(call.args) == 1 and simple_name(call.func) in ("model", "net"):
            yield call


def _random_call(node: ast.expr, file: _File) -> ast.Call | None:
    """Return the call that creates a random tensor, directly or through a variable of the file."""
    if isinstance(node, ast.Name):
        assignments = (n for n in ast.walk(file.tree) if isinstance(n, ast.Assign))
        targets = ((target, n.value) for n in assignments for target in n.targets)
        name = node.id
        node = next((value for t, value in targets if isinstance(t, ast.Name) and t.id == name), node)
    return node if isinstance(node, ast.Call) and simple_name(node.func) in _RANDOM else None


def _literal(node: ast.expr, constants: dict[str, Any]) -> Any:
    """Return the value of a literal or of a constant of the file; ``None`` if it is neither."""
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    try:
        value = ast.literal_eval(node)
        return None if value is ... else value  # ... is a value to be filled in
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _training_line(tree: ast.Module) -> int:
    """Return the line of a backward pass that importing a file would run; 0 if there is none."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Call) and simple_name(node.func) == "backward":
            return node.lineno
        todo += list(ast.iter_child_nodes(node))
    return 0
