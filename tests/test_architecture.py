"""The floors of docs/architecture.md, held by reading the imports; and small files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ampaudit"
# a module imports only from lower floors or its own package
FLOORS = {
    "errors": 0,
    "files": 1, "formats": 1, "sites": 1, "replay": 1, "ranges": 1, "words": 1, "pages": 1,
    "comments": 1, "settings": 1,
    "policy": 2, "checkpoint": 2,
    "source": 3, "trace": 3, "weights": 3,
    "convert": 4, "bounds": 4,
    "run": 5, "archive": 5,
    "report": 6,
    "devices": 7, "gradients": 7, "lint": 7,
    "checks": 8,
    "advice": 9,
    "assembly": 10,
    "training": 11,
    "workflows": 12,
    "gate": 13, "bench": 13,
    "outputs": 14,
    "testing": 15,
    "cli": 16,
}  # fmt: skip
WITHOUT_TORCH = (
    *(
        "errors",
        "files",
        "formats",
        "sites",
        "replay",
        "ranges",
        "words",
        "pages",
        "comments",
        "settings",
        "policy",
        "report",
        "devices",
        "lint",
    ),
    *("outputs", "testing", "cli"),
)
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem in FLOORS)


def package_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = package_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "ampaudit" or len(parts) == 1:
            continue
        other = parts[1]
        allowed = other == own or FLOORS[other] < FLOORS[own]
        assert allowed, f"{path.name} on floor {FLOORS[own]} imports {name} on floor {FLOORS[other]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_low_floors_and_the_command_line_do_not_import_torch(path: Path) -> None:
    if package_of(path) in WITHOUT_TORCH:
        assert not any(n.split(".")[0] == "torch" for n in imports_of(path, top_level_only=True))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_small_and_say_what_they_do(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 310
    assert ast.get_docstring(ast.parse(text)), "a module begins with one sentence on its job"


def test_nothing_committed_names_a_machine() -> None:
    # spelt in two parts so that this line does not find itself
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "/" + "root/", "/" + "work/"]
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*"), *ROOT.glob("*.txt"), *PACKAGE.rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not any(host in text for host in hosts), path
