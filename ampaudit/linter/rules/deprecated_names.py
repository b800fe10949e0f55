"""Rules on deprecated names: ``torch.cuda.amp`` and ``apex.amp``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from ampaudit.linter.diagnostic import Diagnostic, Fix
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, enters_autocast, has_name, last_component, simple_name
from ampaudit.linter.flow.torch_names import DEPRECATED, canonical_name
from ampaudit.linter.flow.values import FunctionInfo

__all__ = ["check_autograd_functions", "check_deprecated_names"]

_PRODUCTS: Final = frozenset(
    "matmul mm bmm einsum addmm baddbmm linear conv1d conv2d conv3d conv_transpose2d mv".split()
)


# code that chooses dtypes itself
_OWN_DTYPES = re.compile(r"autocast|\.to\(|\.float\(|\.type_as\(|dtype")
_NAMES = re.compile(r"\b(?:cuda|cpu)\.amp\b|\bapex\b|\bcuda +import\b|\bcpu +import\b")


def check_deprecated_names(script: Script) -> Iterator[Diagnostic]:
    """Check imports and uses of deprecated names."""
    if _NAMES.search(script.text) is None:
        return
    nodes = script.nodes()
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names: dict[str, str] = {}
    by_version, called = _version_dependent(nodes), _called(nodes)
    for node in imports:
        if id(node) in by_version:
            continue
        yield from _check_import(script, node, names, nodes, called)
    # an expression is reported once, at its outermost attribute, where it is called or passed on
    inner = _mentions(nodes) | by_version
    for use in nodes:
        if not isinstance(use, ast.Attribute) or id(use) in inner:
            continue
        base: ast.AST = use
        while isinstance(base, ast.Attribute):
            base = base.value
            inner.add(id(base))
        text = dotted_name(use)
        head = text.partition(".")[0]
        path = canonical_name(names.get(head, head) + text[len(head) :]) if text else ""
        if path in DEPRECATED:
            details = (DEPRECATED[path], path.rpartition(".")[2], text)
            fix = Fix.at(use, "rename use", *details)
            yield _deprecated(use, path, fix if id(use) in called else None)


_VERSION = re.compile(r"version|hasattr|GREATER|TORCH_|_[12]_\d|>= ?\(?[12]", re.IGNORECASE)


def _mentions(nodes: list[ast.AST]) -> set[int]:
    """Return ids of nodes in comparisons, collections and annotations, which name things without use."""
    ids: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            ids.update(map(id, node.elts))
        elif isinstance(node, ast.Dict):
            ids.update(map(id, (*node.keys, *node.values)))
        elif isinstance(node, ast.Compare):
            ids.update(map(id, (node.left, *node.comparators)))
        for name in ("annotation", "returns"):
            annotation = getattr(node, name, None)
            if isinstance(annotation, ast.AST):
                ids.update(map(id, ast.walk(annotation)))
    return ids


def _version_dependent(nodes: list[ast.AST]) -> set[int]:
    """Return ids of nodes that run only for some versions of torch."""
    ids: set[int] = set()
    for node in nodes:
        decides = isinstance(node, ast.If | ast.IfExp) and _VERSION.search(ast.unparse(node.test))
        falls_back = isinstance(node, ast.Try) and any(
            has_name(handler.type, error)
            for handler in node.handlers
            for error in ("ImportError", "AttributeError")
            if handler.type is not None
        )
        if decides or falls_back:
            ids.update(map(id, ast.walk(node)))
    return ids


def _check_import(
    script: Script,
    node: ast.Import | ast.ImportFrom,
    names: dict[str, str],
    nodes: list[ast.AST],
    called: set[int],
) -> Iterator[Diagnostic]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                names[alias.asname] = alias.name
            if alias.name.split(".")[0] == "apex" and "apex.amp" in script.text:
                yield _apex(node)
        return
    module = node.module or ""
    for alias in node.names:
        names[alias.asname or alias.name] = f"{module}.{alias.name}"
    if node.level:
        return
    if module == "apex" and any(alias.name == "amp" for alias in node.names):
        yield _apex(node)
    old = [alias for alias in node.names if canonical_name(f"{module}.{alias.name}") in DEPRECATED]
    if old:
        path = canonical_name(f"{module}.{old[0].name}")
        local = [alias.asname or alias.name for alias in old]
        exported = any(alias.asname == alias.name for alias in old)
        plain = len(old) == len(node.names) and not exported and _only_called(nodes, called, local)
        details = (DEPRECATED[path], *(f"{a.name}={a.asname or a.name}" for a in old))
        fix = Fix.at(node, "rename import", *details) if plain else None
        yield _deprecated(node, path, fix, ", ".join(alias.name for alias in old))


def _called(nodes: list[ast.AST]) -> set[int]:
    """Return ids of nodes that are called, or that decorate as ``custom_fwd`` and ``custom_bwd`` do."""
    ids = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            ids |= {id(d) for d in node.decorator_list if has_name(d, "custom_")}
    return ids


def _only_called(nodes: list[ast.AST], called: set[int], names: list[str]) -> bool:
    """Return whether names are only called or used as decorators, and never bound again.

    A name without any use may be there for other files, which call it as it was.
    """
    bound = [alias for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names]
    if sum((alias.asname or alias.name) in names for alias in bound) > len(names):
        return False
    uses = [n for n in nodes if isinstance(n, ast.Name) and n.id in names]
    exported = any(isinstance(n, ast.Constant) and n.value in names for n in nodes)
    if exported or {use.id for use in uses} != set(names):
        return False
    return all(isinstance(use.ctx, ast.Load) and id(use) in called for use in uses)


def _deprecated(node: ast.AST, path: str, fix: Fix | None, names: str = "") -> Diagnostic:
    device, name = DEPRECATED[path], path.rpartition(".")[2]
    spelt = {
        "autocast": f'torch.autocast("{device}", ...)',
        "GradScaler": f'torch.amp.GradScaler("{device}", ...)',
        "custom_fwd": f'torch.amp.custom_fwd(device_type="{device}")',
        "custom_bwd": f'torch.amp.custom_bwd(device_type="{device}")',
    }[name]
    what = f"{path.rpartition('.')[0]}: {names}" if names else path
    return Diagnostic("AMP864", node, f"{what} is deprecated since torch 2.4", f"write {spelt}", fix)


def _apex(node: ast.AST) -> Diagnostic:
    return Diagnostic(
        "AMP865",
        node,
        "apex.amp is deprecated and missing from newer versions of apex",
        "use torch.autocast and torch.amp.GradScaler; 'ampaudit explain AMP865' shows how",
    )


def check_autograd_functions(script: Script) -> Iterator[Diagnostic]:
    """Report functions with matrix products that lack ``custom_fwd`` or ``custom_bwd``."""
    if "autocast" not in script.text or "Function" not in script.text:
        return
    for info in script.classes.values():
        if not any(last_component(base) == "Function" for base in info.bases):
            continue
        forward, backward = info.methods.get("forward"), info.methods.get("backward")
        if forward is None or backward is None:
            continue
        has = [
            any(has_name(decorator, name) for decorator in method.node.decorator_list)
            for method, name in ((forward, "custom_fwd"), (backward, "custom_bwd"))
        ]
        if has == [False, True]:  # backward raises, whatever it computes
            yield _diagnostic(info.node, forward, backward, has)
            continue
        chooses_dtypes = not any(has) and _OWN_DTYPES.search(ast.unparse(info.node))
        if all(has) or chooses_dtypes or not (_multiplies(forward) or _multiplies(backward)):
            continue
        if _runs_under_autocast(script, info.node.name):
            yield _diagnostic(info.node, forward, backward, has)


def _runs_under_autocast(script: Script, name: str) -> bool:
    """Return whether it is applied in an autocast block, in a module, or by a function called in one."""
    inside: set[str] = set()
    applied: list[ast.FunctionDef | ast.ClassDef | ast.Assign] = []
    for node in script.nodes():
        if isinstance(node, ast.With) and enters_autocast(node):
            inside |= {
                dotted_name(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute)
            }
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign):
            applied += [node] if f"{name}.apply" in ast.unparse(node) else []
    return f"{name}.apply" in inside or any(_is_entered(script, node, inside) for node in applied)


def _is_entered(script: Script, node: ast.FunctionDef | ast.ClassDef | ast.Assign, inside: set[str]) -> bool:
    if isinstance(node, ast.Assign):
        return any(dotted_name(target) in inside for target in node.targets)
    if isinstance(node, ast.ClassDef):
        info = script.classes.get(node.name)
        return info is not None and info.derives("Module")
    return node.name in inside or any(has_name(d, "autocast") for d in node.decorator_list)


def _multiplies(info: FunctionInfo) -> bool:
    for node in ast.walk(info.node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return True
        if isinstance(node, ast.Call) and simple_name(node.func) in _PRODUCTS:
            return True
    return False


def _diagnostic(
    node: ast.ClassDef, forward: FunctionInfo, backward: FunctionInfo, has: list[bool]
) -> Diagnostic:
    missing = " and ".join(n for n, there in zip(("custom_fwd", "custom_bwd"), has, strict=True) if not there)
    decorators = tuple(
        f"{name} {info.node.lineno}"
        for name, info, there in (("custom_fwd", forward, has[0]), ("custom_bwd", backward, has[1]))
        if not there
    )
    static = forward.is_static and backward.is_static
    fix = Fix.at(node, "decorate", *decorators) if static and not any(has) else None
    return Diagnostic(
        "AMP850",
        node,
        f"{node.name} has no {missing}: its backward runs without autocast, "
        "on whatever dtypes the forward saved",
        'decorate forward with torch.amp.custom_fwd(device_type="cuda") and backward with'
        ' torch.amp.custom_bwd(device_type="cuda")',
        fix,
    )
