"""Mistakes in other ways of writing them: what frameworks run, names of numbers, casts far from their use."""

from __future__ import annotations

from textwrap import indent

import pytest
import torch

from ampaudit.findings.finding import Severity
from tests.linter.examples import lint


def alarms(text: str) -> set[str]:
    linted = lint(text)
    assert not linted.unread
    return {finding.code for finding in linted.findings if finding.severity != Severity.NOTE}


NET = """
import torch
import torch.nn as nn
import torch.nn.functional as F
{imports}


class Net(nn.Module):
    def __init__(self, size, fill=-1e9, eps=1e-8):
        super().__init__()
        self.fc, self.fill, self.eps = nn.Linear(size, size), fill, eps

    def forward(self, x, mask):
        h = self.fc(x)
        {body}


{run}
"""
BY_ACCELERATE = """
accelerator = Accelerator(mixed_precision={precision})
net = Net(4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for x, mask, y in loader:
    loss = F.mse_loss(net(x, mask), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
BY_FABRIC = """
fabric = Fabric(precision={precision})
net = Net(4)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
for x, mask, y in loader:
    fabric.backward(F.mse_loss(net(x, mask), y))
    optimizer.step()
"""
INVERSE = "return torch.linalg.inv(h.t() @ h)"


@pytest.mark.parametrize(
    ("run", "precision", "body", "expected"),
    [
        (BY_ACCELERATE, '"fp16"', INVERSE, {"AMP846"}),
        (BY_ACCELERATE, '"bf16"', INVERSE, {"AMP846"}),
        (BY_ACCELERATE, '"no"', INVERSE, set()),
        (BY_ACCELERATE, "args.precision", INVERSE, set()),
        (BY_FABRIC, '"16-mixed"', INVERSE, {"AMP846"}),
        (BY_FABRIC, '"32-true"', INVERSE, set()),
        (BY_ACCELERATE, '"fp16"', "return torch.linalg.inv((h.t() @ h).float())", set()),
        (BY_ACCELERATE, '"fp16"', "return h.log_softmax(-1)", set()),
    ],
)
def test_a_framework_calls_the_model_under_autocast(
    run: str, precision: str, body: str, expected: set[str]
) -> None:
    imports = "from accelerate import Accelerator\nfrom lightning.fabric import Fabric"
    text = NET.format(imports=imports, body=body, run=run.format(precision=precision))
    assert alarms(text) == expected


BLOCK = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
{before}
    for x, y in loader:
        {inside}
            loss = torch.nn.functional.mse_loss(model(x), y)
        {backward}
        optimizer.step()
        optimizer.zero_grad()
"""
BY_ITSELF = "accelerator.backward(loss)"
CUDA = 'torch.autocast("cuda", dtype=torch.bfloat16{more})'


@pytest.mark.parametrize(
    ("before", "inside", "backward", "expected"),
    [
        ("with accelerator.autocast():", "if True:", BY_ITSELF, {"AMP852"}),
        (f"with {CUDA.format(more='')}:", "if True:", BY_ITSELF, {"AMP852"}),
        (f"with {CUDA.format(more=', cache_enabled=False')}:", "if True:", BY_ITSELF, set()),
        ("if True:", "with accelerator.autocast():", BY_ITSELF, set()),
    ],
)
def test_blocks_around_a_loop(before: str, inside: str, backward: str, expected: set[str]) -> None:
    assert alarms(BLOCK.format(before=before, inside=inside, backward=backward)) == expected


DECORATED = """
import torch


@torch.autocast("cuda", dtype=torch.bfloat16{more})
def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
DEFAULT_DTYPE = """
import torch

dtype = torch.bfloat16 if args.short else torch.float16
{chosen}
for x, y in loader:
    with torch.autocast("cuda"):
        loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
"""


def test_a_decorator_is_a_block() -> None:
    assert alarms(DECORATED.format(more="")) == {"AMP852"}
    assert "AMP852" not in alarms(DECORATED.format(more=", cache_enabled=False"))


def test_a_function_may_use_the_dtype_that_its_module_chooses() -> None:
    chosen, loop = DEFAULT_DTYPE.format(chosen="").split("for x", 1)
    function = "def train(model, loader):\n" + indent(f"for x{loop}", "    ")
    assert "AMP856" in alarms(chosen + function)


def test_the_default_dtype_of_autocast_may_be_set() -> None:
    assert "AMP856" in alarms(DEFAULT_DTYPE.format(chosen=""))
    assert "AMP856" not in alarms(DEFAULT_DTYPE.format(chosen='torch.set_autocast_dtype("cuda", dtype)'))


CALLED = """
def predict(x, mask):
    net = Net(4{more})
    with torch.autocast("cuda", dtype=torch.float16):
        return net(x, mask)
"""
HALVED = """
net = Net(4).half().cuda()


@torch.no_grad()
def predict(x, mask):
    return net(x.half(), mask)
"""


@pytest.mark.parametrize("run", [CALLED, HALVED])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return h.masked_fill(mask, self.fill)", {"AMP860"}),
        ("return torch.where(mask, h, torch.full_like(h, self.fill))", {"AMP860"}),
        ("h[mask] = self.fill; return h", {"AMP860"}),
        ("return h.fill_diagonal_(self.fill)", {"AMP860"}),
        ("return h + (1.0 - mask.to(h.dtype)) * -1e9", {"AMP860"}),
        ("return h.float().masked_fill(mask, self.fill)", set()),
        ("return h / (h.amax(-1) + self.eps)", {"AMP861"}),
        ("return torch.clamp(h.amax(-1, keepdim=True), min=self.eps)", {"AMP861"}),
        ("return h / (h.float().amax(-1) + self.eps)", set()),
    ],
)
def test_numbers_that_arguments_stand_for(run: str, body: str, expected: set[str]) -> None:
    assert alarms(NET.format(imports="", body=body, run=run.format(more=""))) == expected


def test_a_call_decides_what_a_default_is() -> None:
    body = "return h.masked_fill(mask, self.fill) / (h.amax(-1) + self.eps)"
    run = CALLED.format(more=", fill=-1e4, eps=1e-6")
    assert alarms(NET.format(imports="", body=body, run=run)) == set()


@pytest.mark.parametrize(
    "body",
    ["h.masked_fill(mask, -1e9)", "torch.full_like(h, -1e9)", "h.fill_diagonal_(-1e9)", "h.fill_(-1e9)"],
)
def test_torch_refuses_what_float16_cannot_hold(body: str) -> None:
    tensors = {"h": torch.zeros(2, 2, dtype=torch.float16), "mask": torch.eye(2, dtype=torch.bool)}
    with pytest.raises(RuntimeError, match="without overflow"):
        eval(body, {"torch": torch}, tensors)


LOGITS = """
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("tiny", torch_dtype=torch.{dtype}).cuda()


@torch.no_grad()
def banned(ids, words):
    logits = model(ids).logits
    logits[:, words] = -1e9
    return logits
"""


def test_logits_have_the_dtype_of_the_weights() -> None:
    assert alarms(LOGITS.format(dtype="float16")) == {"AMP860"}
    assert alarms(LOGITS.format(dtype="bfloat16")) == set()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return torch.linalg.inv(h.t() @ h / h.shape[0])", {"AMP846"}),
        ("return torch.linalg.inv(h.t() @ h / (len(h) - 1))", {"AMP846"}),
        ("return torch.linalg.inv(h.t() @ h / math.sqrt(h.size(0)))", {"AMP846"}),
        ("return torch.linalg.inv(h.t() @ h / scale)", set()),
        ("return torch.linalg.inv(h.t() @ h.sum(0, dtype=torch.float32))", {"AMP846"}),
        ("return torch.linalg.inv(h.mean(0, dtype=torch.float32))", set()),
    ],
)
def test_numbers_of_python_leave_the_dtype(body: str, expected: set[str]) -> None:
    assert alarms(NET.format(imports="import math", body=body, run=CALLED.format(more=""))) == expected


SUMMED = """
import torch
from torch import nn

net = nn.Linear(9, 9).cuda()


def total(x):
    with torch.autocast("cuda", dtype=torch.float16):
        y = net(x)
    return {value}
"""


@pytest.mark.parametrize("value", ["y.sum({})", "torch.sum(y{})"])
def test_an_op_may_be_given_its_dtype(value: str) -> None:
    assert alarms(SUMMED.format(value=value.format(""))) == {"AMP873"}
    more = ", dtype=torch.float32" if value.startswith("torch") else "dtype=torch.float32"
    assert alarms(SUMMED.format(value=value.format(more))) == set()


STEPS = """
import torch
from torch import nn


class Trainer:
    def __init__(self, model):
        self.model, self.loss_of = nn.Linear(9, 2).cuda(), nn.{loss}()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.model(x)

    def step(self, x, y):
        loss = self.loss_of(self.forward(x){cast}, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""


def test_what_runs_backward_begins_outside_autocast() -> None:
    assert alarms(STEPS.format(loss="CrossEntropyLoss", cast="")) == {"AMP854"}
    assert alarms(STEPS.format(loss="CrossEntropyLoss", cast=".float()")) == set()
    assert alarms(STEPS.format(loss="MSELoss", cast="")) == set()  # y may be float32, and then so is the loss


CACHE = """
import torch


def build(size, dtype):
    positions = torch.arange(size, dtype=dtype)
    return torch.cos(positions[:, None] * torch.rand(8))


cache = build(8192, torch.{dtype})
"""


def test_a_helper_is_followed_that_is_given_a_dtype() -> None:
    assert alarms(CACHE.format(dtype="bfloat16")) == {"AMP869"}
    assert alarms(CACHE.format(dtype="float32")) == set()


AVERAGE = """
import copy
import torch

net = build().cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
teacher = copy.deepcopy(net){cast}
for x in loader:
    net(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for a, b in zip(teacher.parameters(), net.parameters()):
            {update}
"""


@pytest.mark.parametrize(
    "update",
    [
        "a *= 0.999; a += 0.001 * b",
        "a.data *= 0.999; a.data += 0.001 * b.data",
        "a.data = 0.999 * a.data + (1 - 0.999) * b.data",
        "a.data = a.data * decay + (1.0 - decay) * b.data",
        "a.copy_(a * decay + b * (1 - decay))",
    ],
)
def test_averages_by_operators(update: str) -> None:
    assert alarms(AVERAGE.format(cast=".bfloat16()", update=update)) == {"AMP867"}
    assert alarms(AVERAGE.format(cast="", update=update)) == set()


def test_other_operators_average_nothing() -> None:
    for update in ("a += 0.001 * b", "a.data = b.data", "a *= 0.999"):
        assert alarms(AVERAGE.format(cast=".bfloat16()", update=update)) == set()


SMALL_STEPS = """
import argparse
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

settings = SimpleNamespace(rate=1e-5)
model = AutoModelForCausalLM.from_pretrained("tiny", torch_dtype={dtype})
optimizer = torch.optim.AdamW({parameters}, lr={rate})
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINED = "filter(lambda p: p.requires_grad, model.parameters())"


@pytest.mark.parametrize(
    ("dtype", "parameters", "rate", "expected"),
    [
        ("torch.bfloat16", TRAINED, "settings.rate", {"AMP870"}),
        ('"bfloat16"', TRAINED, "1e-5", {"AMP870"}),
        ('"float16"', TRAINED, "1e-5", {"AMP862"}),
        ('"float32"', TRAINED, "settings.rate", set()),
        ('"auto"', TRAINED, "settings.rate", set()),
        ("torch.bfloat16", TRAINED, "settings.other", set()),
    ],
)
def test_settings_and_dtypes_of_an_optimizer(
    dtype: str, parameters: str, rate: str, expected: set[str]
) -> None:
    assert alarms(SMALL_STEPS.format(dtype=dtype, parameters=parameters, rate=rate)) == expected


CHOSEN = """
import torch

if args.short:
    dtype = torch.bfloat16
else:
    dtype = torch.{other}
for x, y in loader:
    with torch.autocast("cuda"):
        loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
"""


def test_statements_choose_a_dtype_as_well() -> None:
    assert "AMP856" in alarms(CHOSEN.format(other="float16"))
    assert "AMP856" not in alarms(CHOSEN.format(other="float32"))


FUNCTION = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision={precision})


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


product = Product.apply


class Layer(torch.nn.Module):
    def forward(self, x):
        return product(x, self.weight)
"""


def test_functions_that_a_framework_runs_under_autocast() -> None:
    assert alarms(FUNCTION.format(precision='"bf16"')) == {"AMP850"}
    assert alarms(FUNCTION.format(precision='"no"')) == set()


HALF_TOTAL = """
import torch

total = torch.tensor(0.0, dtype=torch.{dtype})
for loss in losses:
    total += loss
"""


def test_a_total_in_a_tensor_of_one_number() -> None:
    assert alarms(HALF_TOTAL.format(dtype="float16")) == {"AMP873"}
    assert alarms(HALF_TOTAL.format(dtype="float32")) == set()


@pytest.mark.parametrize("name", ["clip_grad_norm", "clip_grad_norm_", "clip_grad_value_"])
def test_every_function_of_torch_that_clips_is_known(name: str) -> None:
    assert hasattr(torch.nn.utils, name)
    text = f"""
import torch

def train(model, optimizer, loader, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.{name}(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
    assert alarms(text) == {"AMP807"}
