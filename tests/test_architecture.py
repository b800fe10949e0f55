"""The floors of docs/architecture.md, read from the imports: no circle, no arrow upwards, no stray torch."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ampaudit.instruments import NAMES
from tests.support.paths import ROOT

PACKAGE = ROOT / "ampaudit"
# a package imports only from lower floors
FLOORS = {
    "core": 0,
    "policy": 1, "checkpoint": 1, "findings": 1,
    "render": 2,
    "report": 3,
    "views": 4, "trace": 4, "linter": 4,
    "source": 5, "bounds": 5, "devices": 5,
    "run": 6, "recording": 6,
    "audit": 7,
    "instruments": 8, "parallel": 8,
    "tuning": 9,
    "export": 10, "training": 10,
    "benchmarking": 11, "ci": 11,
    "cli": 12,
}  # fmt: skip
WITHOUT_TORCH = {"core", "policy", "findings", "render", "report", "views", "linter", "cli"}
# the only module that replaces attributes of torch, and those that tell it what to replace while a model is
# loaded or traced
PATCHER = "ampaudit.trace.internals"
PATCHING = {
    "ampaudit.trace.capture",  # while torch exports
    "ampaudit.recording.calls",  # nn.Module.__call__, while a program is recorded
    "ampaudit.source.streamed",  # nn.Module: parameters without weights, and weights that are assigned
    "ampaudit.source.huggingface",  # the switch of huggingface_hub to work offline
    "ampaudit.trace.caster",  # autocast for CUDA on machines without it
    "ampaudit.trace.backward.tracer",  # autograd functions, hooks, Tensor.data and grad_fn
    "ampaudit.trace.interpose",  # the method of the tracer that records ops
    "ampaudit.trace.isolation",  # autocast regions, in calls of a model in FP32
    "ampaudit.trace.path.recorder",  # what tells code that it is being traced; reads of fake tensors
}
# private modules of torch that the whole package may name: types of ops, nested containers, dispatch modes
PUBLIC_ENOUGH = ("torch._ops", "torch.utils._pytree", "torch.utils._python_dispatch.TorchDispatchMode")
# further modules that name private ones
PRIVATE = {
    PATCHER,
    "ampaudit.benchmarking.memory",
    "ampaudit.run.low_precision",
    "ampaudit.source.pt2.graph",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
INNER = [name for name in MODULES if name.count(".") > 0 and name != "ampaudit.__main__"]


def room_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") > 0 else module


def by_room(modules: list[str]) -> pytest.MarkDecorator:
    """One case per room, with its modules; thousands of tiny cases cost more than they check."""
    rooms = {room: [name for name in modules if room_of(name) == room] for room in map(room_of, modules)}
    return pytest.mark.parametrize("modules", rooms.values(), ids=rooms.keys())


@cache
def imports_of(module: str, *, when_loaded: bool = False) -> frozenset[str]:
    """What a module imports; with ``when_loaded`` only what its own import needs."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if when_loaded and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys()
            if not inner <= MODULES.keys():
                found.add(node.module)
        pending += ast.iter_child_nodes(node)
    return frozenset(found - {module})


@cache
def ways_from(module: str) -> dict[str, str]:
    """Everything that importing a module loads, ours and others', each with the imports that lead to it."""
    ways, pending = {module: module}, [module]
    while pending:
        name = pending.pop()
        if name in MODULES:
            parents = {name.rpartition(".")[0]} if "." in name else set()
            for other in sorted((imports_of(name, when_loaded=True) | parents) - ways.keys()):
                ways[other] = f"{ways[name]} -> {other}"
                pending.append(other)
    return ways


def way_to_torch(module: str) -> str:
    """The imports by which a module loads torch, as ``a -> b -> torch``; empty if it does not."""
    return next((way for name, way in ways_from(module).items() if name.split(".")[0] == "torch"), "")


def test_every_room_has_a_floor() -> None:
    assert {room_of(name) for name in INNER} == FLOORS.keys()
    assert all((PACKAGE / room / "__init__.py").is_file() for room in FLOORS)


@by_room(INNER)
def test_imports_go_down(modules: list[str]) -> None:
    for module in modules:
        own = room_of(module)
        for name in imports_of(module):
            if name == "ampaudit" or name.startswith("ampaudit."):
                assert name != "ampaudit", f"{module} imports the public API; import the module itself"
                other = room_of(name)
                assert other == own or FLOORS[other] < FLOORS[own], (
                    f"{module} on floor {FLOORS[own]} imports {name} on floor {FLOORS[other]}"
                )


def test_no_module_needs_itself() -> None:
    graph = {name: {other for other in imports_of(name) if other in MODULES} for name in INNER}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@by_room([name for name in INNER if room_of(name) in WITHOUT_TORCH])
def test_torch_is_not_loaded(modules: list[str]) -> None:
    for module in modules:
        way = way_to_torch(module)
        assert not way, f"a module of this room loads torch; import it in the function that needs it: {way}"


def test_instruments_are_declared_without_torch() -> None:
    folders = {name.split(".")[2] for name in INNER if name.startswith("ampaudit.instruments.")}
    assert folders == set(NAMES), "add each folder to NAMES in instruments/__init__.py"
    for name in NAMES:
        way = way_to_torch(f"ampaudit.instruments.{name}")
        assert not way, f"an instrument's __init__.py loads torch; only measuring.py may: {way}"


def test_files_are_checked_by_a_process_without_torch() -> None:
    """It starts while the file is run elsewhere: to load torch would take longer than the check."""
    assert not way_to_torch("ampaudit.export.onnx.check")


def test_a_plain_scan_loads_nothing_of_other_modes() -> None:
    modes = (
        "audit.advi",
        "audit.proofs",
        "audit.sweep",
        "bounds",
        "instruments.backward.audit",
        "instruments.against.r",
    )
    for module in ("ampaudit.cli.scan_command", "ampaudit.audit.scan"):
        for name, way in ways_from(module).items():
            loaded = name.removeprefix("ampaudit.").startswith(modes)
            assert not loaded, f"import it in the function that needs it: {way}"


def test_a_checkpoint_is_converted_without_what_traces_models() -> None:
    for name, way in ways_from("ampaudit.export.weights").items():
        assert not name.startswith(("ampaudit.trace", "ampaudit.run")), f"this takes half a second: {way}"


def defined(module: str) -> set[str]:
    """The public names that a module defines, not those that it imports."""
    names: set[str] = set()
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in names_in(target)}
    return {name for name in names if not name.startswith("_")}


def test_no_two_modules_export_the_same_name() -> None:
    uniform = {"CHECK", "CHECKS", "CAUSE"}  # of every check, every cause
    uniform |= {"INSTRUMENT", "MEASURING"}  # of every instrument
    uniform |= {"assert_safe"}  # the pytest plugin's fixture hands out the function
    imported: dict[str, set[str]] = {}
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in INNER:
                imported.setdefault(node.module, set()).update(alias.name for alias in node.names)
    exporters: dict[str, list[str]] = {}
    for module, names in imported.items():
        for name in (names & defined(module)) - uniform:
            exporters.setdefault(name, []).append(module)
    twice = {name: modules for name, modules in exporters.items() if len(modules) > 1}
    assert not twice, "rename all but one of these"


def torch_names(tree: ast.Module) -> dict[str, str]:
    """What the names of a module stand for, of those that are torch or something in it."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    found |= {name: name for name in found if name == "torch"}
    return {name: path for name, path in found.items() if path.split(".")[0] == "torch"}


def names_in(tree: ast.AST) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name)]


def dotted(node: ast.expr) -> str:
    """``torch.cuda.amp`` for an expression that is such a chain of names, else nothing."""
    text = ast.unparse(node)
    return text if all(part.isidentifier() for part in text.split(".")) else ""


@by_room(INNER)
def test_torch_is_replaced_in_one_place_only(modules: list[str]) -> None:
    for module in modules:
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        imported = imports_of(module)
        assert ("unittest.mock" in imported or "unittest" in imported) is (module == PATCHER)
        if module != PATCHER:
            replaces = PATCHER in imported and any(name.id == "patched" for name in names_in(tree))
            assert replaces is (module in PATCHING), "keep the list PATCHING exact"
        names = torch_names(tree)
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
            if isinstance(node, ast.AnnAssign | ast.AugAssign):
                targets = [node.target]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
                targets = [ast.Attribute(node.args[0], "_")]
            for target in targets:
                path = dotted(target) if isinstance(target, ast.Attribute) else ""
                setting = path.startswith("torch.backends.")  # a flag, which is there to be set
                assert setting or path.split(".")[0] not in names, f"{module}:{node.lineno} assigns to {path}"


@by_room(sorted(set(INNER) - PRIVATE))
def test_private_modules_of_torch_are_named_in_few_places(modules: list[str]) -> None:
    for module in modules:
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        names = torch_names(tree)
        paths = set(names.values()) | {
            path.replace(root, names[root], 1)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and (path := dotted(node))
            if (root := path.split(".")[0]) in names
        }
        for path in paths:
            private = re.search(r"\._(?!_)", path) or path.startswith("torch.fx.experimental.")
            allowed = path.startswith(("torch.ops.", *PUBLIC_ENOUGH))
            assert allowed or not private, f"{module} names {path}"


@by_room(list(MODULES))
def test_files_are_small_and_say_what_they_do(modules: list[str]) -> None:
    for module in modules:
        text = MODULES[module].read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 800, f"{module} is longer than 800 lines: divide it by ideas"
        assert ast.get_docstring(ast.parse(text)), "a module begins with one sentence on its job"


SECTION = re.compile(r"^(?:Args|Attributes|Raises):\n((?:    .*\n|\n)+)", re.M)
ENTRY = re.compile(r"    (\S+(, \S+)*: |     *)|$")  # a name, or a further line on one


@by_room(list(MODULES))
def test_sections_of_docstrings_are_lists_of_names(modules: list[str]) -> None:
    """The documentation reads from them what each name means."""
    for module in modules:
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for section in SECTION.finditer(f"{ast.get_docstring(node) or ''}\n"):
                    broken = [line for line in section[1].splitlines() if not ENTRY.match(line)]
                    assert not broken, f"{module}: {node.name}"


def test_no_test_imports_another_test_module() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        tests = [n for n in names if n.split(".")[-1].startswith("test_") and n.startswith("tests.")]
        assert not tests, f"{path} imports {tests}: move what both use to tests/support/, or copy it"


def test_nothing_committed_names_a_machine() -> None:
    # spelt in two parts so that this line does not find itself
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "/" + "root/", "/" + "work/"]
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.*"), *ROOT.glob("*.txt"), *PACKAGE.rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named = [host for host in hosts if host in text]
        assert not named, f"{path} names {named}: write it without"


PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def rooms_and_names() -> list[tuple[str, str]]:
    """Each name in backticks on the architecture page, with the room of its section."""
    found, room = [], ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            room = " ".join(re.findall(r"`([\w/]+)/`", line))
        found += [(room, name) for name in re.findall(r"`([^`]+)`", line) if not line.startswith("## ")]
    return found


def test_the_architecture_page_shows_the_floors() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)/` \|.*\| (yes|no) \|$", PAGE, re.MULTILINE)
    assert {room: int(floor) for floor, room, _ in rows} == FLOORS
    assert {room for _, room, torch in rows if torch == "no"} == WITHOUT_TORCH


@pytest.mark.parametrize(
    ("rooms", "name"), sorted({n for n in rooms_and_names() if n[1].endswith((".py", "/"))})
)
def test_the_architecture_page_names_files_that_exist(rooms: str, name: str) -> None:
    places = [PACKAGE, ROOT, *(PACKAGE / room for room in rooms.split())]
    assert any((place / name).exists() for place in places), f"{name} is not in {rooms or 'the package'}"


def test_the_architecture_page_names_classes_that_exist() -> None:
    defined = set()
    for path in MODULES.values():
        defined |= {
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if hasattr(node, "name")
        }
    named = {name for _, name in rooms_and_names() if re.fullmatch(r"[A-Z][a-z]+\w*", name)}
    assert named - {"ProxyTorchDispatchMode"} <= defined, named - defined
