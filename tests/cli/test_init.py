"""A first model file, written from what a project's code says, without running it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.support.program import run_program

NET = """\
import torch
from torch import nn
WIDTH = 16
class Block(nn.Module):
    def __init__(self, c): super().__init__(); self.c = nn.Conv2d(c, c, 3, padding=1)
    def forward(self, x): return x + self.c(x).relu()
class SmallCNN(nn.Module):
    def __init__(self, channels, classes, width=WIDTH):
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3)
        self.body = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, classes)
    def forward(self, images): return self.head(self.body(self.stem(images)).mean((2, 3)))
"""
TRAIN = "from app.net import SmallCNN\nN = 10\ndef main():\n    model = SmallCNN(3, N)\n    model.train()\n"
STEP = "    x = torch.randn(8, 3, 20, 20)\n    model(x).sum().backward()\n"
WORDS = """\
from torch import nn
class Words(nn.Module):
    def __init__(self, size=50):
        super().__init__()
        self.table, self.out = nn.Embedding(size, 8), nn.Linear(8, 2)
    def forward(self, ids): return self.out(self.table(ids).mean(1))
"""
RUINS = "open('ruined', 'w')\nfrom torch import nn\nclass Net(nn.Linear): ...\n"


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_program(*words, cwd=cwd, environment={"COLUMNS": "300"})


def project(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "make", "inputs"),
    [
        (
            {"app__net": NET, "train": TRAIN},
            "SmallCNN(3, 10)  # as in train.py:4",
            "torch.randn(1, 3, 64, 64)  # what its first layer, nn.Conv2d, takes; other sizes are a guess",
        ),
        (
            {"app__net": NET, "train": TRAIN + STEP},
            "SmallCNN(3, 10)  # as in train.py:4",
            "torch.randn(8, 3, 20, 20)  # as in train.py:6",
        ),
        ({"words": WORDS}, "Words()", "torch.randint(0, 50, (1, 16))  # what its first layer"),
        ({"my-words": WORDS + "made = Words(9)\n"}, "Words(9)  # as in my-words.py", "torch.randint(0, 9, "),
        ({"src__pkg__words": WORDS}, "Words()", "torch.randint(0, 50, (1, 16))"),
    ],
)
def test_what_it_writes_is_scanned(tmp_path: Path, files: dict[str, str], make: str, inputs: str) -> None:
    project(tmp_path, **files)
    done = run("init", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "audit_model.py").read_text()
    assert f"return {make}" in text
    assert f"return {inputs}" in text
    assert done.stdout.splitlines()[-1].endswith("run: ampaudit scan audit_model.py")
    if "src__pkg__words" not in files:  # which has to be installed
        scanned = run("scan", "audit_model.py", cwd=tmp_path)
        assert (scanned.returncode, "PASS" in scanned.stdout) == (0, True), scanned.stderr


def test_what_nobody_calls_is_to_be_filled_in(tmp_path: Path) -> None:
    project(tmp_path, net=NET)
    said = run("init", cwd=tmp_path).stdout
    assert "fill in what SmallCNN needs: channels, classes" in said
    text = (tmp_path / "audit_model.py").read_text()
    assert "return SmallCNN(channels=..., classes=...)  # fill these in" in text
    compile(text, "audit_model.py", "exec")
    again = run("init", "-o", "again.py", cwd=tmp_path).stdout  # which reads the first one
    assert again == said.replace("audit_model.py", "again.py")
    assert (tmp_path / "again.py").read_text() == text.replace("audit_model.py", "again.py")


def test_positional_only_and_keyword_only_parameters(tmp_path: Path) -> None:
    """Defaults belong to the last positional parameters; a keyword without one has to be filled in."""
    text = """\
from torch import nn
class Net(nn.Module):
    def __init__(self, size=8, /, depth=1, *, width):
        super().__init__()
        self.first = nn.Linear(size, width)
    def forward(self, x): return self.first(x)
"""
    done = run("init", cwd=project(tmp_path, net=text))
    assert done.returncode == 0, done.stderr
    assert "fill in what Net needs: width" in done.stdout
    written = (tmp_path / "audit_model.py").read_text()
    assert "return Net(width=...)  # fill these in" in written
    assert "return torch.randn(1, 8)" in written


def test_a_positional_argument_is_no_keyword_only_parameter(tmp_path: Path) -> None:
    text = """\
from torch import nn
class Net(nn.Module):
    def __init__(self, *sizes, dim=8):
        super().__init__()
        self.first = nn.Linear(dim, 4)
    def forward(self, x): return self.first(x)
model = Net(16, 4)
"""
    assert run("init", cwd=project(tmp_path, net=text)).returncode == 0
    assert "return torch.randn(1, 8)" in (tmp_path / "audit_model.py").read_text()


def test_an_input_of_which_nothing_is_known_is_to_be_filled_in(tmp_path: Path) -> None:
    project(tmp_path, words=WORDS.replace("forward(self, ids)", "forward(self, ids, mask, scale, act=None)"))
    assert run("init", cwd=tmp_path).returncode == 0
    text = (tmp_path / "audit_model.py").read_text()
    assert "return torch.randint(0, 50, (1, 16)), ..., ...  # what its first layer, nn.Embedding" in text
    assert text.rstrip().endswith("fill in mask, scale")
    refused = run("scan", "audit_model.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert "put an input in its place" in refused.stderr


def test_a_project_without_models_gives_a_frame(tmp_path: Path) -> None:
    project(tmp_path, broken="def (", other="print('no model')\n")
    (tmp_path / "binary.py").write_bytes(b"\0\1")
    done = run("init", cwd=tmp_path)
    assert (done.returncode, "so fill it in" in done.stdout) == (0, True)
    assert run("scan", "audit_model.py", cwd=tmp_path).returncode == 2


def test_classes_of_each_other_and_files_without_an_end(tmp_path: Path) -> None:
    names = "ABCDEFGH"
    cycle = "".join(f"class {name}({', '.join(names)}): ...\n" for name in names)
    project(tmp_path, cycle=cycle, words=WORDS)
    (tmp_path / "endless.py").symlink_to("/dev/zero")
    started = time.monotonic()
    assert "Words of" in run("init", cwd=tmp_path).stdout
    assert time.monotonic() - started < 20


def test_code_is_read_and_not_run(tmp_path: Path) -> None:
    project(tmp_path, net=RUINS + "made = Net(4, 4)\nmade(1).backward()\n")
    said = run("init", cwd=tmp_path).stdout
    assert not (tmp_path / "ruined").exists()
    assert "net.py:5 would train when it is imported" in said


def test_a_name_of_a_file_stays_in_its_comment(tmp_path: Path) -> None:
    project(tmp_path, net=NET)
    (tmp_path / "a\nimport os; os._exit(9) #.py").write_text(
        "from net import SmallCNN\nmade = SmallCNN(3, 4)\n"
    )
    assert run("init", cwd=tmp_path).returncode == 0
    text = (tmp_path / "audit_model.py").read_text()
    assert "SmallCNN(3, 4)" in text
    assert not [line for line in text.splitlines() if line.startswith("import os")]


def test_a_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    project(tmp_path, words=WORDS, audit_model="mine = 1\n")
    refused = run("init", cwd=tmp_path)
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    assert (tmp_path / "audit_model.py").read_text() == "mine = 1\n"
    assert run("init", "--force", cwd=tmp_path).returncode == 0
    assert "Words" in (tmp_path / "audit_model.py").read_text()
    missing = run("init", "gone", cwd=tmp_path)
    assert (missing.returncode, "no such directory" in missing.stderr) == (2, True)
