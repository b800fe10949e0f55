"""Changes of correct scripts: some make a mistake, and some keep them correct.

Each takes a parsed script, changes it in place, and returns whether it found where to.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Final, TypeAlias

Mutation: TypeAlias = Callable[[ast.Module], bool]
Block: TypeAlias = list[ast.stmt]


def _blocks(tree: ast.Module) -> Iterator[Block]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _method(statement: ast.stmt, name: str, receiver: str = "") -> ast.Call | None:
    """Return the call of a statement ``x.name(...)`` in which x has a text in its name."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != name:
        return None
    return call if receiver in ast.unparse(call.func.value).lower() else None


def _is_step(statement: ast.stmt) -> bool:
    call = _method(statement, "step", "scaler")
    return call is not None and len(call.args) == 1


def _is_update(statement: ast.stmt) -> bool:
    return _method(statement, "update", "scaler") is not None


def _is_scaled_backward(statement: ast.stmt) -> bool:
    call = _method(statement, "backward", ".scale(")
    return call is not None and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call)


def _makes_scaler(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).endswith("GradScaler")


def _first(block: Block, is_meant: Callable[[ast.stmt], bool]) -> int | None:
    return next((index for index, statement in enumerate(block) if is_meant(statement)), None)


def _stepped(tree: ast.Module) -> list[str]:
    """Return the optimizers that a scaler steps, each once."""
    calls = (_method(s, "step") for block in _blocks(tree) for s in block if _is_step(s))
    return sorted({ast.unparse(call.args[0]) for call in calls if call is not None})


def _parsed(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def _without(tree: ast.Module, is_meant: Callable[[ast.stmt], bool]) -> bool:
    changed = False
    for block in _blocks(tree):
        kept = [statement for statement in block if not is_meant(statement)]
        changed |= len(kept) < len(block)
        block[:] = kept or [ast.Pass()]
    return changed


def _replaced(tree: ast.Module, new: Callable[[ast.stmt], ast.stmt | None]) -> bool:
    """Replace the statements for which a function returns another one."""
    changed = False
    for block in list(_blocks(tree)):
        for index, statement in enumerate(block):
            replacement = new(statement)
            if replacement is not None:
                block[index], changed = replacement, True
    return changed


def unscale_left_out(tree: ast.Module) -> bool:
    return _without(tree, lambda s: _method(s, "unscale_") is not None) and "clip_grad" in ast.unparse(tree)


def update_left_out(tree: ast.Module) -> bool:
    return _without(tree, _is_update)


def zero_grad_left_out(tree: ast.Module) -> bool:
    others = ("zero_", ".grad", "clear", "reset")
    is_single = len(_stepped(tree)) == 1
    changed = _without(tree, lambda s: _method(s, "zero_grad") is not None)
    return changed and is_single and not any(text in ast.unparse(tree) for text in others)


def step_past_the_scaler(tree: ast.Module) -> bool:
    def stepped(statement: ast.stmt) -> ast.stmt | None:
        call = _method(statement, "step", "scaler") if _is_step(statement) else None
        return None if call is None else _parsed(f"{ast.unparse(call.args[0])}.step()")

    return _replaced(tree, stepped)


def loss_not_scaled(tree: ast.Module) -> bool:
    def plain(statement: ast.stmt) -> ast.stmt | None:
        call = _method(statement, "backward") if _is_scaled_backward(statement) else None
        if (
            call is None
            or not isinstance(call.func, ast.Attribute)
            or not isinstance(call.func.value, ast.Call)
        ):
            return None
        return _parsed(f"({ast.unparse(call.func.value.args[0])}).backward()")

    return _replaced(tree, plain)


def no_scaler(tree: ast.Module) -> bool:
    text = ast.unparse(tree)
    if not loss_not_scaled(tree) or "bfloat16" in text or "enabled" in text or "accelerat" in text:
        return False
    step_past_the_scaler(tree)
    _without(tree, lambda s: _method(s, "unscale_") is not None or _is_update(s) or _makes_scaler(s))
    return "scale" not in ast.unparse(tree).lower()


def update_before_step(tree: ast.Module) -> bool:
    changed = False
    for block in _blocks(tree):
        step, update = _first(block, _is_step), _first(block, _is_update)
        if step is not None and update is not None and step < update:
            block.insert(step, block.pop(update))
            changed = True
    return changed


def zero_grad_before_step(tree: ast.Module) -> bool:
    if len(_stepped(tree)) != 1:
        return False
    for block in _blocks(tree):
        step = _first(block, _is_step)
        call = None if step is None else _method(block[step], "step")
        if step is not None and call is not None:
            block.insert(step, _parsed(f"{ast.unparse(call.args[0])}.zero_grad()"))
            return True
    return False


def unscale_twice(tree: ast.Module) -> bool:
    for block in _blocks(tree):
        index = _first(block, lambda s: _method(s, "unscale_") is not None)
        if index is not None:
            block.insert(index, deepcopy(block[index]))
            return True
    return False


def step_twice(tree: ast.Module) -> bool:
    for block in _blocks(tree):
        index = _first(block, _is_step)
        call = None if index is None else _method(block[index], "step")
        if index is not None and call is not None:
            block.insert(index + 1, _parsed(f"{ast.unparse(call.args[0])}.step()"))
            return True
    return False


def bfloat16_with_scaler(tree: ast.Module) -> bool:
    changed = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("autocast"):
            for keyword in node.keywords:
                if keyword.arg == "dtype" and ast.unparse(keyword.value) == "torch.float16":
                    keyword.value, changed = ast.parse("torch.bfloat16", mode="eval").body, True
    return changed and any(_makes_scaler(s) for block in _blocks(tree) for s in block)


def scaled_loss_logged(tree: ast.Module) -> bool:
    for block in _blocks(tree):
        index = _first(block, _is_scaled_backward)
        if index is not None:
            loss = ast.unparse(block[index]).removesuffix(".backward()")
            block[index : index + 1] = [
                _parsed(f"scaled = {loss}"),
                _parsed("scaled.backward()"),
                _parsed("print(scaled.item())"),
            ]
            return loss.count("backward") == 0
    return False


# with the least share of the scripts in which it is found: in the others, something around it is not known
MISTAKES: Final[dict[str, tuple[Mutation, float]]] = {
    "unscale left out": (unscale_left_out, 0.9),
    "update left out": (update_left_out, 0.9),
    "zero_grad left out": (zero_grad_left_out, 0.75),
    "step past the scaler": (step_past_the_scaler, 0.85),
    "loss not scaled": (loss_not_scaled, 0.9),
    "no scaler": (no_scaler, 0.8),
    "update before step": (update_before_step, 0.9),
    "zero_grad before step": (zero_grad_before_step, 0.9),
    "unscale twice": (unscale_twice, 0.9),
    "step twice": (step_twice, 0.95),
    "bfloat16 with scaler": (bfloat16_with_scaler, 0.75),
    "scaled loss logged": (scaled_loss_logged, 0.9),
}


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names.get(node.arg, node.arg)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        node.arg = None if node.arg is None else self.names.get(node.arg, node.arg)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            node.attr = self.names.get(node.attr, node.attr)
        return node


def other_names(tree: ast.Module) -> bool:
    _Renamed({"scaler": "amp", "optimizer": "adam", "opt": "sgd", "net": "forecaster"}).visit(tree)
    return True


def zero_grad_after_update(tree: ast.Module) -> bool:
    changed = False
    for block in _blocks(tree):
        zeroes = [index for index, s in enumerate(block) if _method(s, "zero_grad") is not None]
        update = _first(block, _is_update)
        if len(zeroes) == 1 and update is not None and zeroes[0] < update:
            block.insert(update, block.pop(zeroes[0]))
            changed = True
    return changed


def zero_grad_by_helper(tree: ast.Module) -> bool:
    def by_helper(statement: ast.stmt) -> ast.stmt | None:
        call = _method(statement, "zero_grad", "opt")
        if call is None or not isinstance(call.func, ast.Attribute):
            return None
        return _parsed(f"prepare_gradients({ast.unparse(call.func.value)})")

    return _replaced(tree, by_helper)


def gradients_of_another_zeroed(tree: ast.Module) -> bool:
    """Zero the gradients of the second of two optimizers before the first steps."""
    names = _stepped(tree)
    for block in _blocks(tree):
        index = _first(block, _is_scaled_backward)
        step = None if index is None else _first(block[index:], _is_step)
        if len(names) == 2 and index is not None and step is not None:
            name = ast.unparse(block[index + step]).rpartition("(")[2].removesuffix(")")
            other = next(other for other in names if other != name)
            block.insert(index + 1, _parsed(f"{other}.zero_grad()"))
            return True
    return False


def _add_helper(tree: ast.Module, text: str) -> None:
    last_import = max(
        (i for i, s in enumerate(tree.body) if isinstance(s, ast.Import | ast.ImportFrom)), default=-1
    )
    tree.body.insert(last_import + 1, _parsed(text))


def step_in_helper(tree: ast.Module) -> bool:
    for block in _blocks(tree):
        index = _first(block[:-1], _is_step)
        if index is None or not _is_update(block[index + 1]):
            continue
        step, update = ast.unparse(block[index]), ast.unparse(block[index + 1])
        scaler, _, optimizer = step.removesuffix(")").partition(".step(")
        if update == f"{scaler}.update()":
            block[index : index + 2] = [_parsed(f"take_step({scaler}, {optimizer})")]
            _add_helper(
                tree,
                "def take_step(grad_scaler, what):\n    grad_scaler.step(what)\n    grad_scaler.update()",
            )
            return True
    return False


def backward_in_helper(tree: ast.Module) -> bool:
    for block in _blocks(tree):
        index = _first(block, _is_scaled_backward)
        text = "" if index is None else ast.unparse(block[index])
        scaler, _, loss = text.partition(".scale(")
        if index is not None and loss.endswith(").backward()"):
            block[index] = _parsed(f"run_backward({scaler}, {loss.removesuffix(').backward()')})")
            _add_helper(
                tree, "def run_backward(grad_scaler, value):\n    grad_scaler.scale(value).backward()"
            )
            return True
    return False


def logged_between(tree: ast.Module) -> bool:
    changed = False
    for block in _blocks(tree):
        for index in reversed(range(len(block))):
            if _is_scaled_backward(block[index]) or _is_step(block[index]):
                block.insert(index + 1, _parsed("log_metrics(number_of_batch)"))
                changed = True
    return changed


def switched_by_setting(tree: ast.Module) -> bool:
    def switched(statement: ast.stmt) -> ast.stmt | None:
        call = statement.value if isinstance(statement, ast.Expr) else None
        plain = "pass"
        if isinstance(call, ast.Call) and _is_scaled_backward(statement):
            scaled = call.func.value if isinstance(call.func, ast.Attribute) else call.func
            plain = f"({ast.unparse(scaled.args[0])}).backward()" if isinstance(scaled, ast.Call) else plain
        elif isinstance(call, ast.Call) and _is_step(statement):
            plain = f"{ast.unparse(call.args[0])}.step()"
        elif not (_is_update(statement) or _method(statement, "unscale_", "scaler")):
            return None
        return _parsed(f"if options.amp:\n    {ast.unparse(statement)}\nelse:\n    {plain}")

    for node in ast.walk(tree):
        switches = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("GradScaler", "autocast"))
        if switches and not any(keyword.arg == "enabled" for keyword in node.keywords):
            node.keywords.append(ast.keyword("enabled", ast.parse("options.amp", mode="eval").body))
    changed = _replaced(tree, switched)
    _add_helper(tree, "from settings import options")
    return changed


HARMLESS: Final[dict[str, Mutation]] = {
    "other names": other_names,
    "zero_grad after update": zero_grad_after_update,
    "zero_grad by a helper": zero_grad_by_helper,
    "gradients of another zeroed": gradients_of_another_zeroed,
    "step in a helper": step_in_helper,
    "backward in a helper": backward_in_helper,
    "logged between": logged_between,
    "switched by a setting": switched_by_setting,
}
