"""Parses a script and collects its functions, classes, imports, and the lines that matter."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeAlias, TypeVar

import re2

from ampaudit.linter.diagnostic import LINES_PER_FILE
from ampaudit.linter.flow.syntax import (
    calls,
    condition_of,
    covers_line,
    dotted_name,
    enters_autocast,
    keyword_value,
    last_component,
    nested_blocks,
    parameter_defaults,
    walk,
    words_of,
)
from ampaudit.linter.flow.values import ClassInfo, FunctionInfo, value_class
from ampaudit.linter.source_text import split_lines

# lines that matter for the precision of a training loop, each from where it first does
MATTERS: Final = re2.compile(
    r"(?:autocast|[Ss]caler|\bscale|unscale_|backward|\bhalf\b|float16|\.float\(|\.step\b|zero_grad|\bgrad\b|clip_grad|\.update\("
    r"|precision|torch\.save|log_softmax|logsumexp|parameters\(|\.mul_\(|lerp_|masked_fill|\d[eE]-?\d|BCELoss|binary_cross|\bamp\b|no_sync|DataParallel|state_dict|autograd|\bitem\("
    r"|Function|ToTensor|DataLoader\(|optim|retain_graph|no_grad|inference_mode|\beval\(|\btrain\(|-\d{5,}|inf\b).*"
)
# and those that matter for a loop in another file
MATTERS_TO_IMPORTERS: Final = re2.compile(
    r"(?:autocast|[Ss]caler|\.scale\(|unscale_|backward|\bhalf\(|float16|\.step\(|zero_grad|\.grad\b|clip_grad|\bamp\b|no_sync"
    r"|DataParallel|state_dict|optim|parameters\(|\.mul_\(|lerp_).*"
)
# files that rules may have something to report in
_MENTIONS = re2.compile(
    r"autocast|GradScaler|unscale_|\bapex\b|half\(|float16|\.amp\b|import amp\b|masked_fill"
    r"|\.scale\(|scaler|-\d+(?:\.\d*)?[eE]\d|-\d{5,}|\d[eE]-|retain_graph|no_sync|autograd\.Function"
    r"|Accelerator|deepspeed|[Ff]abric|precision=|fp16=|FullySharded"
)
N = TypeVar("N", bound=ast.AST)
Condition: TypeAlias = tuple[str, bool]  # a name, and whether it must be true or false
_OPTIMIZER = re.compile(r"optim|^opt(_|\d|$|[A-Z])|^opt_")
_SCHEDULER = re.compile(r"sched")
_MODEL = re.compile(
    r"model|^net|net$|^net_|generator|discriminator|^critic|^actor|^policy_net|encoder$|decoder$|backbone|student|teacher|classifier|transformer|network"
)
_MAKES_MODELS = re.compile(r"build|factory|_fn$|func|creat|make|init|class|cls|load")
_OF_MODELS = frozenset(
    "parameters train eval half named_parameters state_dict no_sync zero_grad (call)".split()
)
_OF_ESTIMATORS = frozenset({"fit", "transform"})
_MAX_TOKENS = 1_000_000  # 500 MB as a syntax tree
_MAX_SETTINGS = 3  # from name to name
_TOKEN = re.compile(r"\w+|[^\w\s]")
_IS_LOSS = re.compile(r"Loss|Criterion|Metric|Wrapper|Function")
_SCALES = re.compile(r"scaler|loss_?scal|grad_?scal", re.IGNORECASE)


@dataclass
class NameUsage:
    """The methods that are called on names, and the optimizers that are passed to scalers.

    Attributes:
        methods: Names of methods, by dotted name.
        stepped: Arguments of ``x.step(...)`` and ``x.unscale_(...)``, by x.
    """

    methods: dict[str, set[str]] = field(default_factory=dict)
    stepped: dict[str, set[str]] = field(default_factory=dict)
    _kinds: dict[str, str] = field(default_factory=dict)

    def is_scaler(self, text: str) -> bool:
        """Return whether a name is used like a gradient scaler: ``unscale_``, or ``scale`` with others."""
        used, is_named = self.methods.get(text, set()), "scaler" in last_component(text).lower()
        if "scale" not in used:
            return "unscale_" in used or (is_named and {"step", "update"} <= used)
        return (
            is_named or bool(used & {"unscale_", "step"}) or ("update" in used and not used & _OF_ESTIMATORS)
        )

    def kind(self, text: str) -> str:
        """Return what a name stands for; empty if its uses do not tell."""
        kind = self._kinds.get(text)
        if kind is None:
            kind = self._kinds[text] = self._kind(text)
        return kind

    def _kind(self, text: str) -> str:
        name, used = last_component(text), self.methods.get(text, set())
        if self.is_scaler(text):
            return "scaler"
        if any(text in arguments and self.is_scaler(scaler) for scaler, arguments in self.stepped.items()):
            return "optimizer"
        if used & {"zero_grad", "step"} and _OPTIMIZER.search(name):
            return "optimizer"
        if "step" in used and _SCHEDULER.search(name):
            return "scheduler"
        lower = name.lower()
        is_model = used & _OF_MODELS and _MODEL.search(lower) and not _MAKES_MODELS.search(lower)
        return "model" if is_model else ""

    @cached_property
    def optimizer_names(self) -> set[str]:
        """The last components of the names of all optimizers."""
        texts = {*self.methods, *(text for arguments in self.stepped.values() for text in arguments)}
        return {last_component(text) for text in texts if self.kind(text) == "optimizer"}


@dataclass
class Script:
    """A parsed module.

    Attributes:
        tree: Syntax tree.
        text: Source text.
        functions: Functions at module level, by name.
        classes: All classes, by name.
        usage: How names are used.
        imports: Dotted names of all imports.
        relevant_lines: Numbers of the lines that matter, in order.
        number: Number among the linted files if another script imports this one; else zero.
        modules: Numbers of the imported files, by dotted module name.
    """

    tree: ast.Module
    text: str
    number: int = 0
    functions: dict[str, FunctionInfo] = field(default_factory=dict)
    classes: dict[str, ClassInfo] = field(default_factory=dict)
    usage: NameUsage = field(default_factory=NameUsage)
    imports: set[str] = field(default_factory=set)
    relevant_lines: list[int] = field(default_factory=list)
    modules: dict[str, int] = field(default_factory=dict)
    _inside: dict[ast.AST, list[ast.AST]] = field(default_factory=dict)

    def nodes(self, inside: ast.AST | None = None) -> list[ast.AST]:
        """Return the nodes of the script, or of one of its functions, outer ones first."""
        root = inside or self.tree
        if root not in self._inside:
            self._inside[root] = walk(root)
        return self._inside[root]

    @cached_property
    def _by_type(self) -> dict[type[ast.AST], list[Any]]:
        nodes: dict[type[ast.AST], list[Any]] = defaultdict(list)
        for node in self.nodes():
            nodes[type(node)].append(node)
        return nodes

    def of_type(self, *kinds: type[N]) -> list[N]:
        """Return the nodes of the script of some kinds, kind by kind, outer ones first."""
        return [node for kind in kinds for node in self._by_type.get(kind, ())]

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node directly around each node."""
        nodes = (node for node in self.nodes() if not isinstance(node, ast.Name | ast.Constant))
        return {child: node for node in nodes for child in ast.iter_child_nodes(node)}

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, innermost first."""
        around = self.parents.get(node)
        while around is not None:
            yield around
            around = self.parents.get(around)

    @cached_property
    def names(self) -> frozenset[str]:
        """All names of variables, parameters and attributes."""
        names = {name.id for name in self.of_type(ast.Name)}
        names.update(attribute.attr for attribute in self.of_type(ast.Attribute))
        names.update(parameter.arg for parameter in self.of_type(ast.arg))
        return frozenset(names.union(keyword.arg or "" for keyword in self.of_type(ast.keyword)))

    @cached_property
    def words(self) -> str:
        """All names, attributes and strings, in lower case and on a line each."""
        return words_of(self.of_type(ast.Name, ast.Attribute, ast.Constant))

    @cached_property
    def assignments(self) -> list[Assignment]:
        """All assignments to dotted names."""
        assignments: list[Assignment] = []
        pending: list[tuple[ast.stmt, Condition | None, ast.AST | None]]
        pending = [(statement, None, None) for statement in self.tree.body]
        for node, condition, function in pending:
            if isinstance(node, ast.Assign):
                names = filter(None, map(dotted_name, node.targets))
                assignments += [Assignment(name, node.value, condition, function) for name in names]
                continue
            blocks = nested_blocks(node)
            tested = condition_of(node.test) if isinstance(node, ast.If) else None
            inside = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            for block in blocks:
                holds = None if tested is None else (tested[0], tested[1] == (block is blocks[0]))
                pending += [(inner, holds, inside) for inner in block]
        return assignments

    @cached_property
    def assigned(self) -> dict[str, list[Assignment]]:
        """The assignments to each dotted name."""
        by_name: dict[str, list[Assignment]] = {}
        for item in self.assignments:
            by_name.setdefault(item.name, []).append(item)
        return by_name

    @cached_property
    def root_module(self) -> ClassInfo | None:
        """The class of a model that nothing in the script makes; ``None`` if there is none, or several."""
        classes = self.classes.values()
        models = [c for c in classes if c.is_module and not _IS_LOSS.search(c.node.name)]
        used = {base for info in classes for base in info.bases}
        used.update(dotted_name(call.func) for call in self.of_type(ast.Call) if models)
        roots = [info for info in models if info.node.name not in used]
        return roots[0] if len(roots) == 1 else None

    @cached_property
    def dtype_choices(self) -> dict[str, ast.expr]:
        """The names that are assigned either 16-bit dtype of torch, with what chooses it."""
        both, choices = {"torch.float16", "torch.bfloat16"}, {}
        for name, items in self.assigned.items() if all(text in self.text for text in both) else ():
            for item in items:
                named = {dotted_name(node) for node in walk(item.value)}
                beside = {dotted_name(i.value) for i in items if i.function is item.function}
                if both <= (named if isinstance(item.value, ast.IfExp | ast.Subscript) else beside):
                    choices[name] = item.value
        return choices

    @cached_property
    def changing(self) -> frozenset[str]:
        """The attributes that several functions set to ``True`` or ``False``: a state, and no settings."""
        functions: dict[str, set[ast.AST | None]] = {}
        for item in self.assignments:
            is_boolean = isinstance(item.value, ast.Constant) and isinstance(item.value.value, bool)
            if "." in item.name and is_boolean:
                functions.setdefault(item.name, set()).add(item.function)
        return frozenset(name for name, places in functions.items() if len(places) > 1)

    @cached_property
    def settings(self) -> dict[str, tuple[str, bool]]:
        """The setting that each name follows, and whether it is true where the setting is.

        A name follows another that it is assigned from, once, or ``not`` that. What is ``None`` unless a
        condition holds, such as a scaler, follows the condition.
        """
        followed = ((name, _followed_setting(items)) for name, items in self.assigned.items())
        return {name: setting for name, setting in followed if setting is not None and setting[0] != name}

    @cached_property
    def defaults(self) -> dict[str, object]:
        """The defaults of settings: of options of argparse, and of fields, by name."""
        pairs = [(dotted_name(field.target), field.value) for field in self.of_type(ast.AnnAssign)]
        for call in self.of_type(ast.Call):
            options = [a.value for a in call.args if isinstance(a, ast.Constant)]
            if options and dotted_name(call.func).endswith("add_argument"):
                name = str(options[-1]).lstrip("-").replace("-", "_")
                pairs.append((name, keyword_value(call, "default")))
        return {name: default.value for name, default in pairs if isinstance(default, ast.Constant)}

    @cached_property
    def off_by_default(self) -> set[str]:
        """The last components of what is set to ``False`` somewhere, also as a default or an argument."""
        pairs = [(item.name, item.value) for item in self.assignments]
        pairs += [(k.arg, k.value) for k in self.of_type(ast.keyword) if k.arg is not None]
        pairs += [(dotted_name(f.target), f.value) for f in self.of_type(ast.AnnAssign) if f.value]
        for function in self.of_type(ast.FunctionDef):
            pairs += parameter_defaults(function.args).items()
        return {
            last_component(name)
            for name, value in pairs
            if isinstance(value, ast.Constant) and value.value is False
        }

    def setting(self, text: str, positive: bool) -> tuple[str, bool]:
        """Return the setting that decides whether a name is true, or false, and what that takes."""
        for _ in range(_MAX_SETTINGS):
            if text not in self.settings:
                break
            text, same = self.settings[text]
            positive = positive == same
        return text, positive

    @cached_property
    def scales_losses(self) -> bool:
        """Whether code, and not only an import or a comment, names a scaler or a loss scale, or uses one."""
        if "scal" not in self.text.lower():
            return False
        products = self.of_type(ast.BinOp, ast.AugAssign)
        return any(map(_SCALES.search, self.names)) or any(map(_multiplies_loss_by_scale, products))

    def sets_own_context(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        """Return whether a function loops over data, enters autocast, or runs backward: it begins outside."""
        if node.name == "forward":
            return False  # the loop that calls it is elsewhere
        if calls(node, "backward"):
            return True
        loops = self.of_type(ast.For, ast.AsyncFor, ast.While, ast.With)
        inside = (loop for loop in loops if covers_line(node, loop.lineno))
        return any(not isinstance(loop, ast.With) or enters_autocast(loop) for loop in inside)

    def is_relevant(self, node: ast.stmt | ast.Lambda) -> bool:
        """Return whether any line of a statement or lambda matters."""
        at = bisect_left(self.relevant_lines, _first_line(node))
        return at < len(self.relevant_lines) and self.relevant_lines[at] <= (node.end_lineno or node.lineno)


def _first_line(node: ast.stmt | ast.Lambda) -> int:
    """Return the line at which a statement begins, with its decorators."""
    decorators = getattr(node, "decorator_list", ())
    return decorators[0].lineno if decorators else node.lineno


class ScriptTooLong(Exception):
    """Raised for a script that would take too much time or memory; the message is one line."""


def parse(text: str) -> ast.Module:
    """Parse a text.

    Raises:
        ScriptTooLong: The text has too many tokens.
        SyntaxError, RecursionError, MemoryError: The text cannot be parsed.
    """
    import warnings

    if len(text) > _MAX_TOKENS and _TOKEN.subn("", text)[1] > _MAX_TOKENS:
        raise ScriptTooLong(f"more than {_MAX_TOKENS:,} tokens: data rather than a script")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes
            return ast.parse(text)
    except ValueError as error:  # a null byte in older versions of Python, half of a surrogate pair
        raise SyntaxError(str(error)) from error


def read_script(text: str, number: int = 0) -> Script:
    """Parse a module and collect what it defines; ``number`` is that of an imported file.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: The text cannot be parsed.
    """
    script, start = Script(parse(text), text, number), number * LINES_PER_FILE
    if start:
        ast.increment_lineno(script.tree, start)
    pattern = MATTERS_TO_IMPORTERS if number else MATTERS
    script.relevant_lines = [start + line for line in matching_lines(pattern, text)]
    lines: set[int] = set()
    _collect(script, script.tree.body, None, lines)
    for node in script.of_type(ast.Import, ast.ImportFrom, ast.ClassDef):
        if node.lineno in lines:  # of a function, or of a block
            _collect(script, [node], None, lines)
    for call in script.of_type(ast.Call):
        if call.lineno in lines:
            _record_call(script.usage, call)
    relevant = {name for name, info in script.classes.items() if info.is_relevant} if not number else set()
    for name, info in script.functions.items() if relevant else ():
        names = {node.id for node in script.nodes(info.node) if isinstance(node, ast.Name)}
        script.functions[name] = replace(info, relevant=info.relevant or not relevant.isdisjoint(names))
    return script


def _collect(script: Script, body: list[ast.stmt], owner: ClassInfo | None, lines: set[int]) -> None:
    """Collect functions, classes and imports, and add the lines of statements and bodies that matter."""
    for node in body:
        if isinstance(node, ast.Import):
            script.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            script.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            bases = tuple(text for base in node.bases if (text := dotted_name(base)))
            base = next((script.classes[base] for base in bases if base in script.classes), None)
            script.classes[node.name] = class_info = ClassInfo(node, bases, {}, base)
            _collect(script, node.body, class_info, lines)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            info = FunctionInfo(node, script.is_relevant(node))
            if owner is not None:
                owner.methods[node.name] = info
            else:
                script.functions.setdefault(node.name, info)
            if info.relevant:
                lines.update(range(_first_line(node.body[0]), (node.end_lineno or node.lineno) + 1))
        elif script.is_relevant(node):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _record_call(usage: NameUsage, node: ast.Call) -> None:
    if text := dotted_name(node.func):
        usage.methods.setdefault(text, set()).add("(call)")
    if text and isinstance(node.func, ast.Attribute):
        text = text.rpartition(".")[0]
        if node.func.attr != "scale" or node.args or node.keywords:  # that of a scaler is given a loss
            usage.methods.setdefault(text, set()).add(node.func.attr)
        if node.func.attr in ("step", "unscale_") and node.args and (argument := dotted_name(node.args[0])):
            usage.stepped.setdefault(text, set()).add(argument)


def _multiplies_loss_by_scale(node: ast.AST) -> bool:
    is_product = isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Mult)
    text = ast.unparse(node).lower() if is_product else ""
    return "loss" in text and "scale" in text


@value_class(frozen=True, slots=True)
class Assignment:
    """An assignment to a name.

    Attributes:
        name: Dotted name.
        value: Assigned expression.
        condition: Condition of the innermost ``if`` around it, if that tests one name.
        function: Innermost function around it.
    """

    name: str
    value: ast.expr
    condition: Condition | None
    function: ast.AST | None


def _followed_setting(items: list[Assignment]) -> Condition | None:
    """Return the setting that a name with some assignments follows."""
    none = [item.condition for item in items if _is_none(item.value)]
    others = [item for item in items if not _is_none(item.value)]
    if len(others) != 1 or len(none) > 1:
        return None
    value, condition = others[0].value, others[0].condition
    if none:  # it is there where its condition holds, or where that of None does not
        return (none[0][0], not none[0][1]) if condition is None and none[0] is not None else condition
    if isinstance(value, ast.IfExp) and _is_none(value.body) != _is_none(value.orelse):
        tested = condition_of(value.test)
        return None if tested is None else (tested[0], tested[1] != _is_none(value.body))
    if isinstance(value, ast.Name | ast.Attribute | ast.UnaryOp) and condition is None:
        return condition_of(value)
    return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def matching_lines(pattern: Any, text: str) -> list[int]:
    """Return the numbers of the lines in which an RE2 pattern matches, at most once in each."""
    if "\r" in text:
        return [number for number, line in enumerate(split_lines(text), 1) if pattern.search(line)]
    lines: list[int] = []
    line, last, encoded = 1, 0, text.encode()  # RE2 matches bytes
    for match in pattern.finditer(encoded):
        line += encoded.count(b"\n", last, match.start())
        last = match.start()
        lines.append(line)
    return lines


def is_worth_reading(text: str) -> bool:
    """Return whether a script contains any word that a rule is about; most files of a project do not."""
    return _MENTIONS.search(text) is not None
