"""Files that paths, directories, links and globs name."""

from __future__ import annotations

import os
from pathlib import Path

from ampaudit.linter.config import LintConfig
from ampaudit.linter.linting import lint_files
from tests.linter.examples import notebook


def test_directories_links_globs_and_what_is_left_out(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "deep/b.py",
        "deep/c.ipynb",
        ".git/d.py",
        "venv/e.py",
        "f.txt",
        "build/g.py",
        "h.md",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" if not name.endswith("ipynb") else notebook("x = 1"))
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    (tmp_path / "same.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "lost.py").symlink_to(tmp_path / "nowhere")

    def read(*paths: str, exclude: tuple[str, ...] = ()) -> list[str]:
        found = lint_files([str(tmp_path / p) for p in paths], LintConfig(exclude=exclude))
        return [os.path.relpath(f.path, tmp_path) for f in found]

    assert read("") == ["a.py", "h.md", "lost.py", "deep/b.py", "deep/c.ipynb"]
    assert read("", exclude=("deep", "h.*")) == ["a.py", "lost.py"]
    assert read("**/*.py") == ["a.py", "build/g.py", "deep/b.py", "lost.py", "venv/e.py"]
    assert read("f.txt", "a.py", "a.py") == ["f.txt", "a.py"]
    assert read("nothing.py") == ["nothing.py"]
    (lost,) = [f for f in lint_files([str(tmp_path)], LintConfig()) if f.path.endswith("lost.py")]
    assert lost.unread[0].reason == "No such file or directory"
