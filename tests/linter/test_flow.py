"""Data flow through names, objects, branches, loops, annotations and unknown code."""

from __future__ import annotations

import pytest
import torch

from tests.linter.examples import GOOD, SCALED_STEPS, codes, training_loop


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        # another name for the same thing
        ("s = scaler\ns.scale(loss).backward()\noptimizer.step()\ns.update()", ["AMP803"]),
        ("total = loss + 1\ntotal.backward()\nscaler.step(optimizer)\nscaler.update()", ["AMP802"]),
        # both branches do it; one does; the other may not
        (
            "if x.ndim:\n    loss.backward()\nelse:\n    loss.backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802", "AMP802"],
        ),
        (
            "if flag:\n    loss.backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
            "else:\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
            ["AMP802"],
        ),
        # a condition that is met twice is the same both times
        (
            "if flag:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n"
            "if flag:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()",
            [],
        ),
        (
            "if flag:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n"
            "if not flag:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()",
            ["AMP802", "AMP803"],
        ),
        # code that is not here may do anything with what it is given, and nothing with what it is not
        ("scaler.scale(loss).backward()\nhelp_me(scaler, optimizer)\noptimizer.step()", []),
        ("scaler.scale(loss).backward()\nlog(loss.detach())\noptimizer.step()\nscaler.update()", ["AMP803"]),
        ("my_backward(loss)\nscaler.step(optimizer)\nscaler.update()", []),
        ("scaler.scale(loss).backward()\nscaler.step(optimizer)\nfinish(scaler)", []),
        ("scaler.scale(loss).backward()\nscaler.step(optimizer)\nfinish(x)", ["AMP804"]),
        # scaled on one path only, which nobody can tell
        (
            "out = loss\nif x.sum() > 0:\n    out = scaler.scale(loss)\nout.backward()\noptimizer.step()\n"
            "scaler.update()",
            [],
        ),
        # paths that end
        (
            "if bad(x):\n    loss.backward()\n    continue\nscaler.scale(loss).backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            [],
        ),
        (
            "try:\n    loss.backward()\nexcept RuntimeError:\n    raise\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802"],
        ),
        # walrus, tuple, conditional expression
        ("(scaled := scaler.scale(loss)).backward()\noptimizer.step()\nscaler.update()", ["AMP803"]),
        ("a, b = loss, 1\na.backward()\nscaler.step(optimizer)\nscaler.update()", ["AMP802"]),
        (
            "out = scaler.scale(loss) if flag else loss\nout.backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802"],
        ),
    ],
)
def test_data_flow(body: str, wanted: list[str]) -> None:
    assert sorted(codes(training_loop(body, ", flag=True"))) == wanted


def test_a_lambda_or_an_own_context_is_not_known() -> None:
    text = GOOD["AMP854 of the loss again"].replace(
        'torch.autocast("cuda", dtype=torch.float16)', "mixed_precision()"
    )
    assert codes(text) == []


@pytest.mark.parametrize(
    "written", ["GradScaler", "'GradScaler'", "torch.amp.GradScaler | None", "Optional[GradScaler]"]
)
def test_an_annotation_says_what_a_parameter_is(written: str) -> None:
    """Nothing else would: the step and the update are somebody else's."""
    text = (
        f"import torch\n\n\ndef back(loss, optimizer, s: {written}):\n    s.scale(loss).backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert codes(text) == ["AMP803"]
    assert codes(text.replace(f": {written}", "")) == []


ACCUMULATING = """import torch


def train(config, model, loader, optimizer, scaler):
    optimizer.zero_grad()
    for i, x in enumerate(loader):
        loss = model(x).mean()
        if config.accumulate > 1:
            scaler.scale(loss / config.accumulate).backward()
            FIRST
            if (i + 1) % config.accumulate == 0:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                SECOND
                optimizer.zero_grad()
            THIRD
        else:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
"""


@pytest.mark.parametrize(
    ("first", "second", "third", "wanted"),
    [
        ("pass", "scaler.update()", "pass", []),
        ("scaler.unscale_(optimizer)", "scaler.update()", "pass", ["AMP810"]),
        ("pass", "pass", "scaler.update()", ["AMP806"]),
    ],
)
def test_a_branch_that_accumulates_is_judged_by_itself(
    first: str, second: str, third: str, wanted: list[str]
) -> None:
    text = ACCUMULATING.replace("FIRST", first).replace("SECOND", second).replace("THIRD", third)
    if "AMP810" in wanted:  # what it unscales, the step must not unscale again
        text = text.replace("                scaler.unscale_(optimizer)\n", "", 1)
    assert codes(text) == wanted


def test_torch_raises_where_update_follows_no_step() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1, requires_grad=True).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


@pytest.mark.parametrize(
    "test", ["amp is True", "amp == True", "amp", "amp is not False", "not amp is False"]
)
def test_a_flag_may_be_compared_with_true(test: str) -> None:
    body = (
        f"if {test}:\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
        "else:\n    loss.backward()\n"
    )
    assert codes(training_loop(f"{body}    optimizer.step()", ", amp=True")) == []
    assert codes(training_loop(f"{body}optimizer.step()", ", amp=True")) == ["AMP817"]


EPOCHS = f"""import torch


def one_epoch(model, loader, optimizer):
    INSIDE
{SCALED_STEPS}

def main(make, loader):
    BEFORE
    for epoch in range(10):
        AGAIN
        one_epoch(model, loader, optimizer)
"""
MODEL = "model = make(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"


RESUMED = f"{MODEL}; optimizer.load_state_dict(torch.load('last.pt'))"


@pytest.mark.parametrize(
    ("before", "again", "wanted"),
    [
        (MODEL, "pass", ["AMP814"]),
        (RESUMED, "pass", ["AMP814"]),  # and not AMP820: no scaler outlives its epoch
        ("pass", MODEL, []),
        ("model, optimizer = make()", "pass", ["AMP814"]),
        ("pass", "model, optimizer = make()", []),
        ("model = make()", "optimizer = model.optimizer()", []),
    ],
    ids=["kept", "resumed", "anew", "unseen", "unseen anew", "its optimizer anew"],
)
def test_a_scaler_that_is_made_in_each_epoch_is_found_across_calls(
    before: str, again: str, wanted: list[str]
) -> None:
    text = EPOCHS.replace("INSIDE", 'scaler = torch.amp.GradScaler("cuda")')
    assert codes(text.replace("BEFORE", before).replace("AGAIN", again)) == wanted


def test_an_optimizer_that_is_made_after_a_loop_does_not_outlive_its_scalers() -> None:
    text = EPOCHS.replace("INSIDE", 'scaler = torch.amp.GradScaler("cuda")')
    text = text.replace("BEFORE", "pass").replace("AGAIN", "model, optimizer = make()")
    assert codes(f"{text}    {MODEL}\n    one_epoch(model, loader, optimizer)\n") == []


TRAINER = """import torch
from factory import folds, make, make_optimizer


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = make_optimizer(model)

    def epoch(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()

    def renew(self):
        pass


def main(loader):
    trainer = Trainer(make())
    for fold in folds:
        trainer.epoch(loader)
"""


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("", "", ["AMP814"]),
        ("        trainer.epoch(", "        trainer = Trainer(make())\n        trainer.epoch(", []),
        ("        trainer.epoch(", "        Trainer(make()).epoch(", []),
        ("    def renew(self):\n        pass", "    def renew(self):\n        self.optimizer = make()", []),
    ],
    ids=["kept", "trainer anew", "unnamed", "renewed"],
)
def test_the_optimizer_of_an_object_lives_as_long_as_the_object(
    old: str, new: str, wanted: list[str]
) -> None:
    assert codes(TRAINER.replace(old, new) if old else TRAINER) == wanted


@pytest.mark.parametrize(
    ("test", "wanted"),
    [
        ("False", []),
        ("0", []),
        ("False and args.clip", []),
        ("args.clip and False", []),
        ("False or 0", []),
        ("True", ["AMP807"]),
        ("args.clip", ["AMP807"]),
        ("False or args.clip", ["AMP807"]),
        ("args.clip or True", ["AMP807"]),
        ("scaler is None and args.clip", []),
    ],
)
def test_what_never_runs_is_not_judged(test: str, wanted: list[str]) -> None:
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    text = training_loop(
        f"scaler.scale(loss).backward()\nif {test}:\n    {clip}\nscaler.step(optimizer)\nscaler.update()"
    )
    assert codes(text) == wanted


def test_a_cast_model_is_the_same_in_a_helper() -> None:
    text = """
import torch
from nets import build

def objective(model, x):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(x).mean()

def train(loader):
    model = build().cuda()
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(objective(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
"""
    assert codes(text) == ["AMP801"]


@pytest.mark.parametrize("name", ["gs", "scaler"])
def test_unscale_in_a_method_is_followed_whatever_the_name_of_the_scaler(name: str) -> None:
    text = f"""
import torch

class Stepper:
    def __init__(self, model):
        self.model = model
        self.adam = torch.optim.Adam(model.parameters())
        self.{name} = torch.amp.GradScaler("cuda")

    def expose(self):
        self.{name}.unscale_(self.adam)

    def step(self, loss):
        self.{name}.scale(loss).backward()
        self.expose()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.{name}.step(self.adam)
        self.{name}.update()
        self.adam.zero_grad()
"""
    assert codes(text) == []


CONFIGURED = f"""import torch
from configs import load


def main(loader):
    config = load()
    model, optimizer = config.build_model(), config.OPTIMIZER(lr=config.lr)
    scaler = torch.amp.GradScaler("cuda")
    if config.resume:
        optimizer.load_state_dict(torch.load(config.resume)["optimizer"])
{SCALED_STEPS}"""


def test_what_unknown_code_makes_is_known_by_its_use() -> None:
    assert codes(CONFIGURED) == ["AMP820"]
    assert codes(CONFIGURED.replace("        optimizer.load_state_dict(", "        print(")) == []
