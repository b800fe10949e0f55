"""``ampaudit lint`` on whole projects: what git ignores, baselines, notebooks, several processes."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampaudit.findings.pages import all_pages
from ampaudit.linter.config import LintConfig
from ampaudit.linter.discovery import find_files
from ampaudit.linter.lint import lint
from ampaudit.linter.linting import LintedFile, lint_files, lint_text
from ampaudit.linter.selection import RuleSelection
from ampaudit.linter.source_text import lines_of_cells
from tests.linter.examples import UNSURE, notebook

CLI = Callable[..., subprocess.CompletedProcess[str]]
BAD = all_pages()["AMP803"].bad.code

PATTERNS = [
    *("*.py", "!keep.py", "out/", "/a/b.py", "a/**/c.py", "# none", "", "deep", "!deep/", "[ab].py"),
    *("\\!odd.py", "a/*", "!a/keep.py", "**/x", "keep.py ", "/out", "a/"),
]  # fmt: skip
NAMES = ["a.py", "keep.py", "!odd.py", "a/b.py", "a/keep.py", "a/x/c.py", "out/a.py", "deep/x/keep.py"]


@pytest.mark.parametrize("seed", range(12))
def test_what_git_ignores_is_left_out(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    for folder in (tmp_path, tmp_path / "a", tmp_path / "deep"):
        (folder / ".gitignore").write_text("\n".join(chance.sample(PATTERNS, chance.randrange(5))))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    words = ["git", "ls-files", "--others", "--exclude-standard", "-z", "*.py"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = find_files([str(tmp_path)], gitignore=True)
    assert {path.relative_to(tmp_path).as_posix() for path in found} == set(told.split("\0")) - {""}
    assert len(list(find_files([str(tmp_path)]))) == len(NAMES)


def test_a_file_of_the_repository_counts_below_it_and_a_named_file_is_read(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("made.py\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "made.py").write_text(BAD)
    assert not lint(tmp_path / "src").findings
    assert lint(tmp_path / "src", gitignore=False).findings
    assert lint(tmp_path / "src" / "made.py").findings


TESTED = """import torch


def test_half(x):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = x @ x
    total = torch.sigmoid(logits).sum()
    with torch.autocast():
        return total
"""


def test_only_errors_count_in_tests(tmp_path: Path) -> None:
    for name in ("test_half.py", "half.py"):
        (tmp_path / name).write_text(TESTED)
    by_file = sorted((Path(found.file).name, found.code) for found in lint(tmp_path).findings)
    assert by_file == [("half.py", "AMP847"), ("half.py", "AMP873"), ("test_half.py", "AMP847")]


def test_what_is_not_known_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNSURE)
    assert not lint(tmp_path, select=["ALL"]).findings


def test_files_have_rules_of_their_own(tmp_path: Path, cli: CLI) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("train.py", "tests/train.py"):
        (tmp_path / name).write_text(BAD)
    table = '[tool.ampaudit.lint.per-file-ignores]\n"tests/*" = ["AMP80"]\n'
    (tmp_path / "pyproject.toml").write_text(table)
    assert "1 error in 2 files" in cli("lint", cwd=tmp_path).stdout
    found = lint(tmp_path, per_file_ignores={"tests/*": ["AMP8"]}).findings
    assert [Path(f.file).parent.name for f in found] == [tmp_path.name]
    (tmp_path / "pyproject.toml").write_text(table.replace("AMP80", "AMP10"))
    done = cli("lint", cwd=tmp_path)
    assert (done.returncode, "matches no lint rule" in done.stderr) == (2, True)


def test_a_baseline_leaves_out_what_was_there(tmp_path: Path, cli: CLI) -> None:
    script = tmp_path / "train.py"
    script.write_text(BAD)
    made = cli("lint", "--fail-on", "never", "-o", "base.json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    script.write_text("# moved\n\n" + BAD)
    done = cli("lint", ".", "--baseline", "base.json", cwd=tmp_path)
    assert (done.returncode, "1 suppressed" in done.stdout) == (0, True)
    script.write_text(BAD.replace("optimizer.step()", "optimizer.step()\n        optimizer.step()"))
    assert cli("lint", "--baseline", "base.json", cwd=tmp_path).returncode == 1
    (tmp_path / "none.json").write_text("{}")
    done = cli("lint", "--baseline", "none.json", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


rows = st.sampled_from(["a = 1\n", "\n", 'b = "\\" {[,"\n', "c", ""])
text_of_cells = st.lists(st.one_of(st.text(max_size=30), st.lists(rows, max_size=4)), max_size=4)


@given(text_of_cells, st.sampled_from([None, 0, 1, 4]))
@settings(deadline=None)
def test_lines_of_a_notebook_are_those_of_its_file(
    sources: list[str | list[str]], indent: int | None
) -> None:
    cells = [{"cell_type": "code", "metadata": {"source": ["no"]}, "source": source} for source in sources]
    text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}, indent=indent)
    lines, found = text.split("\n"), lines_of_cells(text)
    for number, source in enumerate(sources, 1):
        joined = "".join(source)
        for index, row in enumerate(joined.split("\n")):
            if row:
                piece = row[0] if isinstance(source, list) else row  # a line may be in several pieces
                assert json.dumps(piece)[1:-1] in lines[found[number, index + 1] - 1]


@pytest.mark.parametrize("form", ["sarif", "github"])
def test_positions_in_a_notebook_are_lines_of_its_file(tmp_path: Path, cli: CLI, form: str) -> None:
    text = json.dumps(json.loads(notebook("import os", BAD)), indent=1)
    (tmp_path / "a.ipynb").write_text(text)
    line = next(i for i, row in enumerate(text.split("\n"), 1) if "optimizer.step()" in row)
    shown = cli("lint", "--format", form, cwd=tmp_path).stdout
    assert (f"line={line}," if form == "github" else f'"startLine": {line}') in shown
    assert "cell 3" in shown


def test_several_processes_find_the_same_in_the_same_order(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number:03}.py").write_text(BAD if number % 3 else f"{UNSURE}\n(")

    def found(jobs: int) -> list[LintedFile]:
        return list(lint_files([str(tmp_path)], LintConfig(), fix=True, jobs=jobs))

    assert found(2) == found(1)
    assert any(file.after != file.before for file in found(2))


def test_a_file_that_is_read_in_part_is_no_failure() -> None:
    half = lint_text(notebook("x = (", BAD), "a.ipynb", RuleSelection())
    assert (half.was_read, len(half.unread), len(half.findings)) == (True, 1, 1)
    assert not lint_text("x = (", "a.py", RuleSelection()).was_read
    assert lint_text("", "a.py", RuleSelection()).was_read
