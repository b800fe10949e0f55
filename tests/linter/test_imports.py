"""Imports are followed among the files that are linted, and never outside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampaudit.linter.config import LintConfig
from ampaudit.linter.discovery import find_files
from ampaudit.linter.flow.script import Script
from ampaudit.linter.lint import lint, lint_report
from ampaudit.linter.linting import lint_file, lint_files
from ampaudit.linter.selection import RuleSelection
from ampaudit.linter.source_tree import SourceTree
from ampaudit.report.lint import LintFinding
from tests.linter.examples import SCALED_STEPS

LOOP = """
import torch
from {module} import {name}


def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        {call}
        scaler.step(optimizer)
        scaler.update()
"""
CLIP = """
import torch


def bounded(model, limit=1.0):
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def unscaled_and_bounded(scaler, optimizer, model):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def alarms(*paths: Path) -> list[tuple[str, str, int]]:
    found = lint([str(path) for path in paths]).findings
    return [(f.code, Path(f.file).name, f.line) for f in found if f.severity != "note" and not f.suppressed]


PLACES = {
    "a module beside": ("tools.py", "tools"),
    "a package": ("tools/__init__.py", "tools"),
    "a module of a package": ("lib/tools.py", "lib.tools"),
    "beside, relative": ("tools.py", ".tools"),
    "in the src directory": ("src/tools.py", "tools"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_helper_that_clips_too_early_is_found_at_its_call(tmp_path: Path, place: str) -> None:
    file, module = PLACES[place]
    loop = LOOP.format(module=module, name="bounded", call="bounded(model)")
    write(tmp_path, {"train.py": loop, file: CLIP})
    assert alarms(tmp_path) == [("AMP807", "train.py", 13)]
    (found,) = [f for f in lint(str(tmp_path)).findings if f.code == "AMP807"]
    assert f"at line 6 of {Path(file).name}" in found.cause


@pytest.mark.parametrize("place", PLACES)
def test_a_helper_that_unscales_first_is_no_mistake(tmp_path: Path, place: str) -> None:
    file, module = PLACES[place]
    name = "unscaled_and_bounded"
    loop = LOOP.format(module=module, name=name, call=f"{name}(scaler, optimizer, model)")
    write(tmp_path, {"train.py": loop, file: CLIP})
    assert alarms(tmp_path) == []


def test_names_are_followed_through_packages_stars_and_attributes(tmp_path: Path) -> None:
    files = {
        "by_star.py": LOOP.format(module="lib.tools", name="*", call="bounded(model)"),
        "by_package.py": LOOP.format(module="lib", name="bounded", call="bounded(model)"),
        "by_module.py": LOOP.format(module="lib", name="tools", call="tools.bounded(model)"),
        "by_alias.py": LOOP.format(module="lib", name="tools as t", call="t.bounded(model)"),
        "by_path.py": LOOP.format(
            module="os", name="path\nimport lib.tools", call="lib.tools.bounded(model)"
        ),
        "lib/__init__.py": "from .tools import bounded\n",
        "lib/tools.py": CLIP,
    }
    write(tmp_path, files)
    found = alarms(tmp_path)
    assert {(code, file) for code, file, _ in found} == {
        ("AMP807", name) for name in files if name.startswith("by_")
    }
    assert len(found) == 5


def test_an_absolute_import_in_a_package_means_the_module_outside_it(tmp_path: Path) -> None:
    loop = LOOP.format(module="tools", name="bounded", call="bounded(model)")
    harmless = "scaler = None\ndef bounded(model):\n    return model\n"
    write(tmp_path, {"lib/__init__.py": "", "lib/train.py": loop, "lib/tools.py": harmless, "tools.py": CLIP})
    assert alarms(tmp_path) == [("AMP807", "train.py", 13)]


def test_only_files_that_are_linted_are_followed(tmp_path: Path) -> None:
    loop = LOOP.format(module="tools", name="bounded", call="bounded(model)")
    write(tmp_path, {"train.py": loop, "tools.py": CLIP})
    assert alarms(tmp_path / "train.py") == []
    assert alarms(tmp_path / "train.py", tmp_path / "tools.py") == [("AMP807", "train.py", 13)]


BASE = """
import torch


class BaseTrainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def apply(self):
        {first}
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
"""
DERIVED = """
import torch
from base import BaseTrainer


class Trainer(BaseTrainer):
    def train_step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x, y)
        self.scaler.scale(loss).backward()
        self.apply()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""


@pytest.mark.parametrize(("first", "count"), [("self.scaler.unscale_(self.optimizer)", 0), ("pass", 1)])
def test_methods_of_imported_base_classes_are_followed(tmp_path: Path, first: str, count: int) -> None:
    write(tmp_path, {"base.py": BASE.format(first=first), "train.py": DERIVED})
    assert [code for code, _, _ in alarms(tmp_path)] == ["AMP807"] * count


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from .base import BaseTrainer", "BaseTrainer"),
        ("from . import base", "base.BaseTrainer"),
        ("from pkg import base as trainers", "trainers.BaseTrainer"),
        ("import pkg.base", "pkg.base.BaseTrainer"),
        ("import pkg.base as trainers", "trainers.BaseTrainer"),
    ],
)
@pytest.mark.parametrize(("first", "count"), [("self.scaler.unscale_(self.optimizer)", 0), ("pass", 1)])
def test_a_base_class_is_followed_however_it_is_imported(
    tmp_path: Path, line: str, name: str, first: str, count: int
) -> None:
    derived = DERIVED.replace("from base import BaseTrainer", line).replace("(BaseTrainer)", f"({name})")
    files = {"pkg/__init__.py": "", "pkg/base.py": BASE.format(first=first), "pkg/train.py": derived}
    write(tmp_path, files)
    assert [code for code, _, _ in alarms(tmp_path)] == ["AMP807"] * count


STEP = """
import torch


def run_step(model, x, y, precision):
    with torch.autocast("cuda", dtype=precision):
        loss = model(x, y)
    loss.backward()
"""
CALLER = """
import torch
from steps import run_step


def main(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        run_step(model, x, y, torch.float16)
        optimizer.step()
"""


def test_what_only_a_caller_shows_is_reported_in_the_file_it_is_in(tmp_path: Path) -> None:
    write(tmp_path, {"steps.py": STEP, "train.py": CALLER})
    assert alarms(tmp_path) == [("AMP813", "steps.py", 8)]
    assert alarms(tmp_path / "steps.py") == []
    write(
        tmp_path, {"steps.py": STEP.replace("loss.backward()", "loss.backward()  # ampaudit: ignore[AMP813]")}
    )
    assert alarms(tmp_path) == []
    assert not [f for f in lint(str(tmp_path)).findings if f.code == "AMP991"]
    write(tmp_path, {"train.py": CALLER.replace("float16", "bfloat16")})
    assert {f.code for f in lint(str(tmp_path)).findings if not f.suppressed} == {"AMP991"}


def test_several_processes_report_the_same(tmp_path: Path) -> None:
    loop = LOOP.format(module="tools", name="bounded", call="bounded(model)")
    write(tmp_path, {f"train_{i}.py": loop for i in range(70)} | {"tools.py": CLIP, "steps.py": STEP})
    write(tmp_path, {"caller.py": CALLER})

    def found(jobs: int) -> tuple[LintFinding, ...]:
        config = LintConfig()
        return lint_report(list(lint_files([str(tmp_path)], config, jobs=jobs)), config).findings

    assert found(1) == found(2)
    assert len([f for f in found(1) if f.severity != "note"]) == 71


HOSTILE = {
    "a cycle": {
        "a.py": "from b import *\nfrom torch.amp import GradScaler\n",
        "b.py": "from a import *\nscaler = 1\n",
    },
    "itself": {"a.py": "import a\nfrom a import *\nscaler = a.scaler\n"},
    "no Python": {"a.py": "from b import x\nscaler = x\n", "b.py": "scaler = (((\n"},
    "bytes": {"a.py": "from b import x\nscaler = x\n", "b.py": "scaler = '\x00'\n"},
    "dots": {"a.py": "from ........ import b\nfrom .. import *\nfrom . import a\nscaler = b\n"},
    "its own base": {
        "a.py": "from b import B\nclass A(B): scaler = 1\n",
        "b.py": "from a import A\nclass B(A): scaler = 2\n",
    },
    "its own base, from both sides": {
        "x.py": "from base_a import A\nscaler = A().step()\n",
        "base_a.py": "from base_b import B\nclass A(B): scaler = 1\n",
        "base_b.py": "from base_a import A\nclass B(A): scaler = 2\n",
        "y.py": "from base_b import B\nscaler = B().step()\n",
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_imports_that_lead_nowhere_do_no_harm(tmp_path: Path, name: str) -> None:
    write(tmp_path, HOSTILE[name])
    report = lint(str(tmp_path))
    assert not any("internal" in item.reason for item in report.unread)
    assert {Path(item.file).name for item in report.unread} <= {"b.py"}


def test_a_long_file_that_is_imported_hides_nothing(tmp_path: Path) -> None:
    body = "\n".join(f"    y = scaler.scale(x + {i} * (x - {i}))" for i in range(3000))
    bad = LOOP.format(
        module="tools", name="work", call="torch.nn.utils.clip_grad_norm_(model.parameters(), 1)"
    )
    write(
        tmp_path,
        {"tools.py": f"def work(scaler, x):\n{body}\n", "train.py": bad + "        work(scaler, x)\n"},
    )
    assert ("AMP807", "train.py", 13) in alarms(tmp_path)


SHARED = """
import torch


class Scaling:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, loss, optimizer):
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
"""
TRAINING = """
import torch
from shared import Scaling


def train(model, optimizer, loader):
    scaling = Scaling()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}):
            loss = model(x, y)
        scaling.step(loss, optimizer)
"""


def test_a_scaler_of_another_file_may_be_for_float16(tmp_path: Path) -> None:
    files = {f"in_{dtype}.py": TRAINING.format(dtype=dtype) for dtype in ("bfloat16", "float16")}
    write(tmp_path, {"shared.py": SHARED, **files})
    assert alarms(tmp_path) == []


RESUME = """
def resume(model, optimizer, state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
"""


@pytest.mark.parametrize("steps", [0, 3000])
def test_a_helper_that_restores_all_but_the_scaler_is_followed(tmp_path: Path, steps: int) -> None:
    """Also if another file is too long to be followed to its end."""
    loop = LOOP.format(module="resume", name="resume", call="work(x)")
    restores = "\n    resume(model, optimizer, torch.load('last.pt'))\n    for x"
    body = "".join(f"    optimum = x + {i} * (x - {i})\n" for i in range(steps))
    files = {
        "train.py": "from tools import work\n" + loop.replace("\n    for x", restores),
        "resume.py": RESUME,
        "tools.py": f"def work(x):\n{body}    return x\n",
    }
    write(tmp_path, files)
    assert alarms(tmp_path) == [("AMP820", "train.py", 9)]
    (found,) = [item for item in lint(str(tmp_path)).findings if item.code == "AMP820"]
    assert "a checkpoint at line 4 of resume.py, but" in found.cause


ENGINE = f"""import torch


def train_one_epoch(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
{SCALED_STEPS}"""
DRIVER = """import torch
from engine import train_one_epoch


def main(model, loader):
    OPTIMIZER
    for epoch in range(10):
        AGAIN
        train_one_epoch(model, loader, optimizer)


main(None, [])
"""


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_loop_without_a_word_of_mixed_precision_is_followed(tmp_path: Path, is_kept: bool) -> None:
    optimizer = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    text = DRIVER.replace("OPTIMIZER" if is_kept else "AGAIN", optimizer)
    write(
        tmp_path, {"engine.py": ENGINE, "main.py": text.replace("AGAIN", "pass").replace("OPTIMIZER", "pass")}
    )
    assert alarms(tmp_path) == ([("AMP814", "engine.py", 5)] if is_kept else [])


MANUAL = """import pytorch_lightning as pl
from encoder import Encoder


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.encoder(batch).mean()
        loss.backward()
        optimizer.step()
"""


def test_what_is_only_likely_needs_a_word_of_mixed_precision(tmp_path: Path) -> None:
    encoder = "import torch\nDTYPE = torch.float16\n\nclass Encoder(torch.nn.Module):\n    pass\n"
    write(tmp_path, {"net.py": MANUAL, "encoder.py": encoder})
    assert alarms(tmp_path) == []
    write(tmp_path, {"net.py": MANUAL + "\ntrainer = pl.Trainer(precision='16-mixed')\n"})
    assert [code for code, _, _ in alarms(tmp_path)] == ["AMP802"]


def test_each_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = {f"m{i}.py": f"from m{i + 1} import scaler\n" for i in range(5)}
    write(tmp_path, {**chain, "m5.py": "scaler = 1\n"})
    read: list[int] = []
    original = SourceTree._read

    def counted(tree: SourceTree, number: int) -> Script | None:
        read.append(number)
        return original(tree, number)

    monkeypatch.setattr(SourceTree, "_read", counted)
    tree = SourceTree(find_files([str(tmp_path)]))
    for path in tree.paths:
        lint_file(path, RuleSelection(), tree=tree)
    assert sorted(read) == [2, 3, 4, 5, 6]


WRAPPER = """
import torch


class ScaledOptimizer:
    def __init__(self, optimizer, first_scale=None):
        self.loss_scaler = torch.amp.GradScaler("cuda")
        self.optimizer, self.first_scale = optimizer, first_scale

    def backward(self, loss):
        self.loss_scaler.scale(loss).backward()

    def step(self):
        self.loss_scaler.step(self.optimizer)
        self.loss_scaler.{last}
"""
WRAPPED = """
from unittest.mock import MagicMock

import torch
from wrapper import ScaledOptimizer


def test_step(model, loss):
    wrapped = ScaledOptimizer(MagicMock(spec=torch.optim.Optimizer))
    wrapped.loss_scaler = MagicMock()
    wrapped.backward(loss)
    wrapped.loss_scaler.scale(loss)
    wrapped.step()
"""


@pytest.mark.parametrize(("last", "count"), [("update(self.first_scale)", 0), ("get_scale()", 1)])
def test_an_update_in_an_imported_file_counts(tmp_path: Path, last: str, count: int) -> None:
    write(tmp_path, {"test_wrapper.py": WRAPPED, "wrapper.py": WRAPPER.format(last=last)})
    assert len([code for code, _, _ in alarms(tmp_path) if code == "AMP804"]) == count


MANAGED = """
import torch
from torch import nn

from shared import accelerator


def main(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_file_that_only_makes_the_accelerator_is_read(tmp_path: Path) -> None:
    """It says that the gradients are scaled, as ``accelerator.clip_grad_norm_`` knows."""
    shared = 'from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision="fp16")\n'
    write(tmp_path, {"train.py": MANAGED, "shared.py": shared})
    assert alarms(tmp_path) == [("AMP807", "train.py", 13)]
