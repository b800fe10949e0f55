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
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import SimpleNamespace
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


class Recorder(torch.nn.Module):
    """A model that keeps the dtype of autocast around each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 4), set[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        enabled = torch.is_autocast_enabled("cpu")
        self.seen.add(str(torch.get_autocast_dtype("cpu")) if enabled else "")
        return self.layer(x)


CONTEXT = """
{definition}


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        with {context}
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""
CONTEXTS = {
    "a generator": (
        "@contextmanager\ndef amp(on=True):\n    with torch.autocast('cuda', dtype=DTYPE):\n        yield",
        "amp():",
    ),
    "a method that is a generator": (
        "class Amp:\n    def __init__(self, dtype):\n        self.dtype = dtype\n\n    @contextmanager\n"
        "    def forward(self):\n        with torch.autocast('cuda', dtype=self.dtype):\n            yield\n"
        "\n\namp = Amp(DTYPE)",
        "amp.forward():",
    ),
    "a stack": (
        "",
        "ExitStack() as stack:\n            stack.enter_context(torch.autocast('cuda', dtype=DTYPE))",
    ),
    "a property": (
        "class Amp:\n    @property\n    def context(self):\n"
        "        return torch.autocast('cuda', dtype=DTYPE)\n\n\namp = Amp()",
        "amp.context:",
    ),
    "an attribute of a class": (
        "class Amp:\n    dtype = DTYPE\n\n    def context(self):\n"
        "        return torch.autocast('cuda', dtype=self.dtype)\n\n\namp = Amp()",
        "amp.context():",
    ),
    "a namespace": (
        "config = SimpleNamespace(amp=SimpleNamespace(dtype=DTYPE))",
        "torch.autocast('cuda', dtype=config.amp.dtype):",
    ),
    "a namespace that is changed": (
        "config = SimpleNamespace(dtype=None)\nconfig.dtype = DTYPE",
        "torch.autocast('cuda', dtype=config.dtype):",
    ),
    "an attribute by its name": (
        "SETTINGS = {'dtype': 'NAME'}",
        "torch.autocast('cuda', dtype=getattr(torch, SETTINGS['dtype'])):",
    ),
    "defaults": (
        "def context(dtype=DTYPE, make=torch.autocast):\n    return make('cuda', dtype=dtype)",
        "context():",
    ),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize(("dtype", "codes"), [("float16", {"AMP813": Severity.WARNING}), ("bfloat16", {})])
def test_the_dtype_of_a_context_however_it_is_made(name: str, dtype: str, codes: dict[str, Severity]) -> None:
    definition, context = CONTEXTS[name]
    text = CONTEXT.format(definition=definition, context=context)
    text = text.replace("DTYPE", f"torch.{dtype}").replace("NAME", dtype).replace("'cuda'", '"cuda"')
    model = Recorder()
    run(text, model)
    assert model.seen == {f"torch.{dtype}"}
    assert found(text) == codes


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


LAZY = """
class Base:
    def __init__(self, model):
        self.model, self._scaler = model, None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @property
    def scaler(self):
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler("cuda")
        return self._scaler

    def before_step(self):
        pass

    def fit(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.before_step()
            self.scaler.step(self.optimizer)
            {}


class Clipping(Base):
    def before_step(self):
        {}
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def train(model, loader):
    Clipping(model).fit(loader)
"""


def test_a_scaler_that_a_property_makes_in_a_class_that_a_driver_makes() -> None:
    unscale, update = "self.scaler.unscale_(self.optimizer)", "self.scaler.update()"
    right, without_update = LAZY.format(update, unscale), LAZY.format("pass", unscale)
    run(right, torch.nn.Linear(4, 4))
    assert found(right) == {}
    assert found(LAZY.format(update, "pass")) == {"AMP807": Severity.ERROR}
    with pytest.raises(RuntimeError, match="after step"):
        run(without_update, torch.nn.Linear(4, 4))
    assert found(without_update) == {"AMP804": Severity.WARNING}


PENALTY = """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, _ in loader:
        x = x.clone().requires_grad_(True)
        optimizer.zero_grad()
        score = model(x).sum()
        grads = torch.autograd.grad(scaler.scale(score), x, create_graph=True)[0]
        grads = grads {}
        loss = score + (grads.norm(2) - 1) ** 2
        {}.backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize("factor", ["/ scaler.get_scale()", "* (1.0 / scaler.get_scale())"])
def test_gradients_of_a_penalty_without_their_scale(factor: str) -> None:
    assert found(PENALTY.format(factor, "scaler.scale(loss)")) == {}
    assert found(PENALTY.format(factor, "loss")) == {"AMP802": Severity.ERROR}
    assert "AMP837" in found(PENALTY.format("* 1.0", "scaler.scale(loss)"))


DECORATED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.autocast("cuda", dtype=torch.{})
    def forward(self, x):
        return self.layer(x)


def dice(p, y):
    p = p.softmax(1)[:, 1]
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum() + 1.0)


def train(model, loader):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        dice(model(x).float(), y).backward()
        optimizer.step()
"""


def test_a_helper_keeps_the_dtype_in_which_its_arguments_were_computed() -> None:
    assert found(DECORATED.format("float16")) == {"AMP813": Severity.WARNING}
    assert found(DECORATED.format("bfloat16")) == {}


HALVED = """
def train(model, loader):
    model = nn.Linear(4, 4){}
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(model(x{}).float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_filtered_parameters_are_those_of_the_model() -> None:
    right, wrong = HALVED.format("", ""), HALVED.format(".half()", ".half()")
    run(right, torch.nn.Linear(4, 4))
    assert found(right) == {}
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        run(wrong, torch.nn.Linear(4, 4))
    assert found(wrong) == {"AMP801": Severity.ERROR}


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


READ = """
def train(model, loader, history):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        {}
"""


@pytest.mark.parametrize(
    "use",
    [
        "print(f'loss {{{}:.3f}}')",
        "history.append({}.detach().cpu().numpy())",
        "history.add_scalar('loss', {}, 3)",
        "history.log({{'loss': {}.detach()}})",
    ],
)
def test_texts_arrays_and_logs_show_the_scale(use: str) -> None:
    assert found(READ.format(use.format("loss"))) == {}
    assert found(READ.format(use.format("scaled"))) == {"AMP823": Severity.WARNING}
