"""What the flow follows of contexts, settings and conditions that are objects; torch runs the same code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampaudit.findings.finding import Severity
from tests.linter.examples import lint

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

"""


def found(text: str) -> dict[str, Severity]:
    linted = lint(HEAD + text)
    assert not linted.unread
    return {f.code: f.severity for f in linted.findings if f.severity != Severity.NOTE}


def run(text: str, model: torch.nn.Module, batches: int = 4) -> None:
    """Run ``train`` of a text on the CPU, with one scaler for all devices."""
    names: dict[str, Any] = {}
    exec(HEAD + text.replace('"cuda"', '"cpu"'), names)
    names["train"](model, [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))] * batches)


ACCUMULATING = """
def is_last(i):
    return (i + 1) % 2 == 0


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    count = 0
    for i, (x, y) in enumerate(loader):
        scaler.scale(F.cross_entropy(model(x), y) / 2).backward()
        {before}
        {condition}
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        {after}
"""
UPDATED = {"AMP806": Severity.ERROR}


@pytest.mark.parametrize(
    ("before", "condition"),
    [
        ("steps = (i + 1) % 2 == 0", "if steps:"),
        ("steps = i + 1 == len(loader) or (i + 1) % 2 == 0", "if steps:"),
        ("waits = not (i + 1) % 2 == 0", "if not waits:"),
        ("pass", "if is_last(i):"),
        ("count += 1", "if count == 2:\n            count = 0"),
        ("count += 1", "if count >= 2:\n            count = 0"),
    ],
)
def test_a_condition_on_a_count_however_it_is_written(before: str, condition: str) -> None:
    right = ACCUMULATING.format(before=before, condition=condition, after="pass")
    run(right, torch.nn.Linear(4, 4))
    assert found(right) == {}
    wrong = ACCUMULATING.format(before=before, condition=condition, after="scaler.update()")
    with pytest.raises(AssertionError, match="No inf checks"):
        run(wrong, torch.nn.Linear(4, 4))
    assert found(wrong) == UPDATED


PASSED = """
class Steps:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, update=True):
        self.scaler.scale(loss).backward()
        if update:
            self.scaler.step(optimizer)
            {}self.scaler.update()


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = Steps()
    for i, (x, y) in enumerate(loader):
        steps(F.cross_entropy(model(x), y) / 2, optimizer, update=(i + 1) % 2 == 0)
        if (i + 1) % 2 == 0:
            optimizer.zero_grad()
"""


def test_a_condition_on_a_count_that_is_passed() -> None:
    right, wrong = PASSED.format(""), PASSED.replace("            {}", "        ")
    run(right, torch.nn.Linear(4, 4))
    assert found(right) == {}
    with pytest.raises(AssertionError, match="No inf checks"):
        run(wrong, torch.nn.Linear(4, 4))
    assert found(wrong) == UPDATED


ANEW = """
def make():
    return torch.amp.GradScaler("cuda")


class Client:
    def __init__(self, model):
        self.model, self.scaler = model, make()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, x, y):
        {}
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(self.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()

    def fit(self, loader):
        for x, y in loader:
            self.step(x, y)


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        scaler = {}
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


KEPT = make()
"""


@pytest.mark.parametrize(
    ("in_method", "in_loop", "codes"),
    [
        ("scaler = self.scaler", "KEPT", {}),
        ("scaler = make()", "KEPT", {"AMP814": Severity.ERROR}),
        ("scaler = torch.amp.GradScaler('cuda')", "KEPT", {"AMP814": Severity.ERROR}),
        ("scaler = self.scaler", "make()", {"AMP814": Severity.ERROR}),
        (
            "if self.scaler is None:\n            self.scaler = make()\n        scaler = self.scaler",
            "KEPT",
            {},
        ),
    ],
)
def test_a_scaler_that_a_loop_makes_for_an_optimizer_that_lives_on(
    in_method: str, in_loop: str, codes: dict[str, Severity]
) -> None:
    assert found(ANEW.format(in_method, in_loop)) == codes
