"""Models, buffers, attributes and random numbers are after an audit what they were before."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.imports import import_ahead
from ampaudit.trace.isolation import call_unchanged, isolated, seeded


class Writing(nn.Module):
    """Writes buffers and attributes in every mode, and draws random numbers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()))
        self.calls, self.log = 0, [0]
        self.limits: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.calls += 1
        self.log.append(self.calls)
        self.limits["last"] = random.random() + float(np.random.rand())
        self.cache.mul_(0.5).add_(x.mean(0))
        self.scale = self.scale * 0.9
        return self.linear(x) * self.scale + self.cache + self.steps


class Broken(Writing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise ValueError("this model does not run")


def state(model: Writing) -> list[Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [
        {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        *(model.calls, list(model.log), dict(model.limits), model.training),
        *(random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()),
        *([len(vars(m)) for m in model.modules()],),
    ]


X = torch.linspace(-1, 1, 12).reshape(3, 4)
WAYS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "scan": lambda m, _: ampaudit.scan(m, batches=[X, X + 1]),
    "scan half": lambda m, _: ampaudit.scan(m, X, policy="half"),
    "scan graph": lambda m, _: ampaudit.scan(m, X, policy="onnx"),
    "scan static": lambda m, _: ampaudit.scan(m, X, static=True),
    "plan": lambda m, _: ampaudit.plan(m, X),
    "assert_safe": lambda m, _: ampaudit.assert_safe(m, X, fail_on="never"),
    "convert": lambda m, p: ampaudit.convert(m, X, p / "out"),
    "call": lambda m, _: call_unchanged(m, (X,), {}, seed=0),
}


@pytest.mark.parametrize(
    ("kind", "mode"), [(Writing, True), (Writing, False), (Broken, False)], ids=["train", "eval", "broken"]
)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_has_changed(kind: type[Writing], way: str, mode: bool, tmp_path: Path) -> None:
    model = kind().train(mode)
    before = state(model)
    raises = pytest.raises((ampaudit.AuditError, ValueError)) if kind is Broken else contextlib.nullcontext()
    with raises:
        WAYS[way](model, tmp_path)
    assert state(model) == before


def test_measuring_speed_changes_nothing() -> None:
    model = Writing().train()
    before = state(model)
    ampaudit.bench(model, X, modes="fp32,half", repeats=1)
    assert state(model) == before


@pytest.mark.parametrize("policy", ["torch-cuda", "half", "onnx"])
def test_an_autocast_region_around_a_scan_has_no_effect(policy: str) -> None:
    model = Writing().eval()
    report = ampaudit.scan(model, X, policy=policy)
    with torch.autocast("cpu", torch.float16):
        inside = ampaudit.scan(model, X, policy=policy)
        assert model(X).dtype is torch.float32  # Writing adds a float32 buffer
        assert model.linear(X).dtype is torch.float16  # the region is still active
    assert (inside.sites, inside.outputs) == (report.sites, report.outputs)


TABLES: dict[int, torch.Tensor] = {}
NESTED: defaultdict[str, list[torch.Tensor]] = defaultdict(list)


@functools.lru_cache
def positions(n: int) -> torch.Tensor:
    return torch.arange(n) / n


class Caching(nn.Module):
    """Keeps tensors where all models of its class find them."""

    slopes: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @staticmethod
    @functools.cache
    def window(n: int) -> tuple[torch.Tensor, ...]:
        return (torch.hann_window(n),)

    @classmethod
    @functools.cache
    def bias(cls) -> torch.Tensor:
        return torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Caching.slopes is None:
            Caching.slopes = torch.ones(4)
        if 4 not in TABLES:
            TABLES[4] = torch.ones(4)
        if not NESTED["cpu"]:
            NESTED["cpu"].append(torch.ones(4))
        x = self.linear(x) + positions(4) + self.window(4)[0] + Caching.slopes + TABLES[4]
        return x + self.bias() + NESTED["cpu"][0]


@pytest.mark.parametrize("policy", ["half", "onnx"])
def test_what_a_model_caches_is_real_after_a_scan(policy: str) -> None:
    model = Caching().eval()
    NESTED["cpu"].clear()
    for _ in range(2):
        ampaudit.scan(model, X, policy=policy)
    assert (positions.cache_info().currsize, TABLES, NESTED, Caching.slopes) == (0, {}, {"cpu": []}, None)
    expected = model.linear(X) + torch.arange(4) / 4 + torch.hann_window(4) + 4
    torch.testing.assert_close(model(X), expected)
    ampaudit.scan(model, X, policy=policy)
    assert positions.cache_info().currsize == len(TABLES) == 1  # what is real stays
    Caching.slopes = None
    Caching.window.cache_clear()
    Caching.bias.cache_clear()
    positions.cache_clear()
    TABLES.clear()


def test_a_cache_that_the_program_froze_is_real_after_a_scan() -> None:
    """The program freezes all objects after it has loaded a model."""
    model = Caching().eval()
    import_ahead()
    try:
        reports = [ampaudit.scan(model, batches=[X, X[:1]], policy="half") for _ in range(2)]
    finally:
        gc.unfreeze()
    assert [report.verdict for report in reports] == ["pass", "pass"]
    assert (positions.cache_info().currsize, Caching.window.cache_info().currsize) == (0, 0)


def test_threads_may_scan_at_once() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4 + i)) for i in range(4)]
    expected = [ampaudit.scan(model, X).outputs for model in models]
    stdout, random_numbers = sys.stdout, torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda model: ampaudit.scan(model, X), models * 4))
    assert [report.outputs for report in reports] == expected * 4
    assert sys.stdout is stdout
    assert torch.equal(torch.get_rng_state(), random_numbers)


def test_other_threads_may_compute_for_a_scan() -> None:
    """On a GPU, autograd runs the backward pass of a scan in threads of its own."""

    def drawn() -> float:
        with seeded(0):
            return torch.rand(()).item()

    with ThreadPoolExecutor(1) as pool, isolated():
        assert pool.submit(drawn).result(timeout=20) == drawn()


def test_imports_draw_no_random_numbers() -> None:
    code = (
        "import random; state = random.getstate(); import ampaudit; from torch import nn, ones; "
        "ampaudit.convert, str(ampaudit.assert_safe(nn.Linear(2, 2), ones(1, 2))); "
        "assert random.getstate() == state"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_that_writes_its_buffers_verifies(tmp_path: Path) -> None:
    report, made = ampaudit.convert(Writing().eval(), X, tmp_path / "out")
    assert report.exit_code == 0
    assert made is not None
    found = ampaudit.verify(str(tmp_path / "out"))
    assert not found.problems
    assert found.outputs == ("output: the same bits",)
