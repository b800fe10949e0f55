"""The generated pages of the documentation hold all that the code has, and every link has a target."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

import ampaudit
from ampaudit.findings.pages import all_pages
from tests.support.cli import parsed
from tests.support.paths import ROOT


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs_pages = _tool("docs_pages")
PAGES: dict[str, str] = docs_pages.generated_pages()
WRITTEN = sorted((ROOT / "docs").rglob("*.md"))
SOURCES = [*WRITTEN, *(ROOT / file for file in docs_pages.OUTSIDE_DOCS.values())]


def test_every_check_has_a_page_with_both_examples_and_a_row() -> None:
    for code, check in all_pages().items():
        page = PAGES[f"checks/{code}.md"]
        assert page.startswith(f"# {code}: {check.title}\n")
        assert f"```python\n{check.bad.code}```" in page
        assert f"```python\n{check.good.code}```" in page
        assert f"[{code}](checks/{code}.md) | {check.title} | {check.severity}" in PAGES["checks.md"]


def test_the_commands_below_the_examples_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").touch()
    for code, check in all_pages().items():
        for example in (check.bad, check.good):
            _, name, *words = docs_pages.command_of(code, example).split()
            known = {flag for option in parsed(name, words).command.params for flag in option.opts}
            given = {f"--{option.replace('_', '-')}" for option in example.options}
            assert not given - known - {"--train", "--mode", "--crash"}


def test_every_policy_rule_and_profile_is_listed() -> None:
    text = PAGES["policies.md"]
    for path in (ROOT / "rules").glob("*.yaml"):
        policy = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert f"## `{policy['name']}`\n" in text
        assert all(f"| `{rule['id']}` | `{rule['cast']}` |" in text for rule in policy.get("rules", ()))
    profiles = yaml.safe_load((ROOT / "rules" / "profiles" / "loss-scale.yaml").read_text(encoding="utf-8"))
    assert all(f"| `{name}` |" in text for name in profiles)


def test_every_public_name_is_documented() -> None:
    names = [name for name in ampaudit.__all__ if not name.startswith("__")]
    assert sorted(re.findall(r"^::: ampaudit\.(\w+)$", PAGES["api.md"], re.M)) == sorted(names)


@pytest.mark.parametrize("kind", ["report", "rules"])
def test_every_field_of_a_schema_is_listed(kind: str) -> None:
    schema = json.loads((ROOT / "docs" / f"{kind}.schema.json").read_text(encoding="utf-8"))
    text = PAGES[f"{kind}-schema.md"]
    for name, item in {schema["title"]: schema, **schema["$defs"]}.items():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(item.get("properties", ()))


def test_no_generated_page_is_committed() -> None:
    assert not {path.relative_to(ROOT / "docs").as_posix() for path in WRITTEN} & PAGES.keys()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_files_have_targets(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue
        place = path if not target else Path(os.path.normpath(path.parent / target))
        generated = PAGES.get(os.path.relpath(place, ROOT / "docs")) if path in WRITTEN else None
        assert place.exists() or generated, link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", generated or place.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, link


@pytest.mark.parametrize(
    "path", [*SOURCES, ROOT / "examples" / "README.md"], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_paths_of_the_repository_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    rooms = "ampaudit|benchmarks|docs|examples|rules|tests|tools"
    for named in re.findall(rf"(?<![\w./-])(?:{rooms})/[\w./*-]*\w", text):
        assert any(ROOT.glob(named)), named


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What the site is built from, to be changed."""
    pytest.importorskip("mkdocstrings", reason="the extra 'docs' is not installed")
    for folder in ("docs", "rules"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    tools = (f"tools/docs_{name}.py" for name in ("site", "pages", "search"))
    for name in ("mkdocs.yml", *tools, *docs_pages.OUTSIDE_DOCS.values()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def _built(place: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(place / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


def test_the_site_builds_and_loads_nothing_from_other_hosts(copied: Path) -> None:
    built = _built(copied)
    assert built.returncode == 0, built.stderr
    for path in (copied / "site").rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"""(src|srcset)=["']?(https?:)?//|url\((["']?)(https?:)?//""", text), path
        assert not re.search(r"""<link\b[^>]*\bhref=["']?(https?:)?//""", text), path
    index = copied / "site" / "search" / "search_index.json"
    search = _tool("docs_search")
    assert search.unanswered(index) == []
    everything = json.loads(index.read_text(encoding="utf-8"))
    for page in everything["docs"]:
        page.pop("boost", None)
    index.write_text(json.dumps(everything), encoding="utf-8")
    assert any("'ignore a finding' finds checks/" in missed for missed in search.unanswered(index))


BROKEN = {
    "[a page](no-page.md)": "no-page.md",
    "[an anchor](checks.md#no-anchor)": "#no-anchor",
    "[an API anchor](api.md#ampaudit.no_function)": "#ampaudit.no_function",
    "![a picture](no-picture.svg)": "no-picture.svg",
    "[a folder](../examples/)": "../examples/",
}


def test_every_broken_link_fails_the_build(copied: Path) -> None:
    with (copied / "docs" / "proofs.md").open("a", encoding="utf-8") as file:
        file.write("\n" + "\n\n".join(BROKEN) + "\n")
    built = _built(copied)
    assert built.returncode != 0
    warnings = [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    for complaint in BROKEN.values():
        assert any(complaint in line for line in warnings), complaint
    assert len(warnings) == len(BROKEN)


@pytest.mark.parametrize(
    "tag", ['<script src="//example.org/x.js">', '<link rel="stylesheet" href="https://a/b.css">']
)
def test_a_page_that_loads_from_another_host_is_refused(tag: str) -> None:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    from mkdocs.exceptions import PluginError

    hooks, page = _tool("docs_site"), SimpleNamespace(file=SimpleNamespace(src_uri="x.md"))
    linked = '<a href="https://example.org">elsewhere</a>'
    assert hooks.on_post_page(linked, page) == linked
    with pytest.raises(PluginError, match="another host"):
        hooks.on_post_page(f"<p>{tag}", page)
