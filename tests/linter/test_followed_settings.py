"""What the flow follows of settings, functions as values, loops over objects, and fields."""

from __future__ import annotations

import pytest

from ampaudit.findings.finding import Severity
from tests.linter.examples import lint

HEAD = """
import functools
import torch
import torch.nn.functional as F
from contextlib import nullcontext
from dataclasses import dataclass, field
from torch import nn

"""


def found(text: str) -> dict[str, Severity]:
    linted = lint(HEAD + text)
    assert not linted.unread
    return {f.code: f.severity for f in linted.findings if f.severity != Severity.NOTE}


MODES = """
def train(model, optimizer, scaler, loader, config):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if config.mode == "none":
            loss.backward()
        elif config.mode == "amp":
            scaler.scale(loss).backward()
        if config.mode == "{}":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
"""


def test_what_equals_one_text_equals_no_other() -> None:
    assert found(MODES.format("amp")) == {}
    assert "AMP802" in found(MODES.format("none"))


OPTIONAL = """
class Trainer:
    def __init__(self, model, optimizer, config):
        self.model, self.optimizer, self.config = model, optimizer, config
        {}

    def step(self, x):
        loss = self.model(x).mean()
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        if self.config.{}:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
"""
MADE = [
    "self.scaler = torch.amp.GradScaler('cuda') if self.config.amp else None",
    "self.scaler = None\n        if self.config.amp:\n            self.scaler = torch.amp.GradScaler('cuda')",
    "self.amp = self.config.amp\n        self.scaler = torch.amp.GradScaler('cuda') if self.amp else None",
]


@pytest.mark.parametrize("made", MADE)
def test_a_scaler_follows_the_setting_that_it_is_made_by(made: str) -> None:
    assert found(OPTIONAL.format(made, "amp")) == {}
    assert "AMP803" in found(OPTIONAL.format(made, "other"))


FLAG = """
class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda")
        {}

    def unscale(self):
        if not self.done:
            self.scaler.unscale_(self.optimizer)
            self.done = True

    def step(self, model, loss):
        self.scaler.scale(loss).backward()
        self.unscale()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.done = False
"""


def test_an_attribute_that_methods_change_is_no_setting() -> None:
    assert found(FLAG.format("self.done = False")) == {}


SAVED = """
def save(path, model, optimizer, **others):
    state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    for name, value in others.items():
        state[name] = value.state_dict()
    torch.save(state, path)


def train(model, loader, path, saved=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    save(path, model, optimizer{})
"""


ONE_STEP = """

def warm_up(model, optimizer, batch):
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_scaler_of_one_step_beside_that_of_a_loop() -> None:
    assert found(SAVED.format("") + ONE_STEP) == {"AMP820": Severity.WARNING}


def test_a_scaler_among_other_keywords_may_be_saved() -> None:
    assert found(SAVED.format("")) == {"AMP820": Severity.WARNING}
    assert found(SAVED.format(", scaler=scaler")) == {}


CONTEXT = """
def train(net: nn.Module, loader, half=True):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    context = {}
    for x, y in loader:
        optimizer.zero_grad()
        with context():
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "context",
    [
        "lambda: torch.autocast('cuda', dtype=torch.{})",
        "functools.partial(torch.autocast, 'cuda', dtype=torch.{})",
        "(lambda: torch.autocast('cuda', dtype=torch.{})) if half else nullcontext",
    ],
)
def test_lambdas_and_partials_are_called(context: str) -> None:
    assert found(CONTEXT.format(context.format("float16"))) == {"AMP813": Severity.WARNING}
    assert found(CONTEXT.format(context.format("bfloat16"))) == {}


UNROLLED = """
def train(a, b, loader):
    first, second = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(b(a(x)), y)
        scaler.scale(loss).backward()
        for optimizer in (first, second):
            scaler.step(optimizer)
        {}scaler.update()
        for optimizer in (first, second):
            optimizer.zero_grad()
"""


def test_a_loop_over_optimizers_runs_for_each() -> None:
    assert found(UNROLLED.format("")) == {}
    assert found(UNROLLED.format("    ")) == {"AMP806": Severity.ERROR}


PER_BATCH = """
class Fitter:
    def __init__(self, model):
        self.model, self.count = model, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def consume(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(self.model(x), y) / 4
        self.scaler.scale(loss).backward()
        self.count += 1
        {}
        if self.count % 4 == 0:
            {}
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
"""


def test_accumulation_in_a_method_that_is_called_for_each_batch() -> None:
    unscale = "self.scaler.unscale_(self.optimizer)"
    assert found(PER_BATCH.format("pass", unscale)) == {}
    assert found(PER_BATCH.format(unscale, "pass")) == {"AMP810": Severity.ERROR}


FIELDS = """
@dataclass
class Run:
    net: nn.Module
    opt: torch.optim.Optimizer
    amp: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cuda"))

    def dump(self):
        return {{"net": self.net.state_dict(), "opt": self.opt.state_dict(){}}}


def step(run: Run, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(run.net(x), y)
    run.amp.scale(loss).backward()
    {}
    torch.nn.utils.clip_grad_norm_(run.net.parameters(), 1.0)
    run.amp.step(run.opt)
    run.amp.update()


def write(run: Run, path):
    torch.save(run.dump(), path)


def read(run: Run, path):
    state = torch.load(path)
    run.opt.load_state_dict(state["opt"])
    run.amp.load_state_dict(state["amp"])
"""


def test_fields_are_what_their_annotations_say() -> None:
    unscale, saved = "run.amp.unscale_(run.opt)", ", 'amp': self.amp.state_dict()"
    assert found(FIELDS.format(saved, unscale)) == {}
    assert found(FIELDS.format(saved, "pass")) == {"AMP807": Severity.ERROR}
    assert found(FIELDS.format("", unscale)) == {"AMP820": Severity.WARNING}


EXPORTED = """
def export(net, path):
    torch.save(net.half().state_dict(), path)
    {}


def train(loader, path):
    net = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(9):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if epoch % 3 == 0:
            export(net, path)
"""


def test_a_model_that_some_iterations_cast_is_likely_float16_in_the_next() -> None:
    assert found(EXPORTED.format("pass")) == {"AMP801": Severity.WARNING}
    assert found(EXPORTED.format("net.float()")) == {}


GUESSED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        maps = self.inner(x)
        return self.outer(maps / (maps.amax(1, keepdim=True) + {}))


def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


def test_the_only_model_of_a_file_is_guessed_and_what_follows_is_likely() -> None:
    assert found(GUESSED.format("1e-8")) == {"AMP861": Severity.WARNING}
    assert found(GUESSED.format("1e-4")) == {}
    assert (
        found(GUESSED.format("1e-8") + "\nclass Other(Net):\n    pass\n\nclass Third(nn.Module):\n    pass\n")
        == {}
    )
