"""Files that lint must not follow, cannot read, or would take too long for."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampaudit.findings.pages import all_pages
from ampaudit.linter.config import LintConfig
from ampaudit.linter.linting import lint_bytes, lint_files
from ampaudit.linter.selection import RuleSelection
from tests.support.clock import soon

Cli = Callable[..., subprocess.CompletedProcess[str]]
HEAD = "import torch\nfrom torch.cuda.amp import autocast, GradScaler\n"
BAD = all_pages()["AMP803"].bad.code


def test_a_directory_that_cannot_be_listed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.py").write_text("pass\n")
    (tmp_path / "secret").mkdir()
    real, opened = os.scandir, os.open

    def refuse(path: Any) -> None:
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))

    def scandir(path: Any) -> Any:
        refuse(path)
        return real(path)

    def open_(path: Any, *arguments: Any, **more: Any) -> int:
        refuse(path)
        return opened(path, *arguments, **more)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "open", open_)
    unread = [item for file in lint_files([str(tmp_path)], LintConfig()) for item in file.unread]
    assert [str(item) for item in unread] == [f"{tmp_path / 'secret'}:1: not read: Permission denied"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no FIFOs")
def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path, cli: Cli) -> None:
    os.mkfifo(tmp_path / "a.py")
    (tmp_path / "b.py").symlink_to("/dev/zero")
    (tmp_path / "c.py").symlink_to("c.py")
    done = cli("lint", tmp_path)
    assert done.returncode == 2
    assert done.stdout.count("not a regular file") == 2
    assert "c.py" in done.stdout


@pytest.mark.parametrize("given", [".", "inside", "*/*.py"])
def test_fix_does_not_follow_a_link_out_of_the_tree(tmp_path: Path, cli: Cli, given: str) -> None:
    (tmp_path / "outside.py").write_text(BAD)
    tree = tmp_path / "tree"
    (tree / "inside").mkdir(parents=True)
    (tree / "inside" / "link.py").symlink_to(tmp_path / "outside.py")
    (tree / "inside" / "own.py").write_text(BAD)
    done = cli("lint", "--fix", given, cwd=tree)
    assert (tmp_path / "outside.py").read_text() == BAD
    assert (tree / "inside" / "own.py").read_text() != BAD
    assert "link.py: not fixed" in done.stderr
    cli("lint", "--fix", "inside/link.py", cwd=tree)  # the user names it
    assert (tmp_path / "outside.py").read_text() != BAD
    assert (tree / "inside" / "link.py").is_symlink()


def branches(count: int) -> str:
    lines = "".join(
        f"    if a{i}:\n        loss = model(x); scaler.scale(loss).backward()\n" for i in range(count)
    )
    return f"{HEAD}scaler = GradScaler()\ndef f(a, model, x):\n{lines}"


def functions(count: int) -> str:
    body = (
        "    scaler = GradScaler()\n    for x in loader:\n        with autocast():\n"
        "            loss = model(x)\n        scaler.scale(loss).backward()\n        scaler.step(opt)\n"
    )
    return HEAD + "".join(f"def f{i}(model, opt, loader):\n{body}" for i in range(count))


LONG = {
    "branches": branches(4000),
    "numbers": f"{HEAD}x = [{'1, ' * 3_000_000}]\n",
    "deep": f"{HEAD}x = {'(' * 100_000}\n",
    "operators": f"{HEAD}x = {'a + ' * 1_000_000}a\n",
    "attributes": f"{HEAD}x = a{'.b' * 1_000_000}\n",
    "elif": f"{HEAD}if a: pass\n" + "elif a: pass\n" * 100_000,
}


@pytest.mark.parametrize("name", LONG)
def test_a_script_that_is_too_long_is_told(name: str) -> None:
    """Each of up to 10 MB takes a few seconds on an idle machine."""
    with soon():
        found = lint_bytes(LONG[name].encode(), "x.py", RuleSelection())
    assert len(found.unread) == 1, found.findings[:2]
    assert not found.findings


def test_time_grows_with_the_number_of_functions_and_not_with_its_square() -> None:
    seconds = []
    for count in (250, 1000):
        tries = []
        for _ in range(3):  # the shortest is the least disturbed
            start = time.process_time()
            assert not lint_bytes(functions(count).encode(), "x.py", RuleSelection()).unread
            tries.append(time.process_time() - start)
        seconds.append(min(tries))
    assert seconds[1] < 10 * seconds[0], seconds  # 16 if it were the square
