"""A trace is used only for calls that would run the same code; the oracle is the model's own eager run."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.audit.inputs import as_source
from ampaudit.audit.scan import scan
from ampaudit.trace.state import PythonState, call_key

X = torch.linspace(-1, 1, 8).reshape(2, 4)
Call = Callable[[nn.Module], Any]


@dataclass
class Options:
    power: int = 1
    names: tuple[str, ...] = ()


class Model(nn.Module):
    """Runs a function of itself; ``steps`` and ``layers`` are what it may read and write."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.function = function
        self.steps, self.scale = 0, 1.0
        self.seen: list[int] = []
        self.settings: dict[str, Any] = {"power": 1}
        self.options = Options()
        self.table = np.ones(4, dtype=np.float32)
        self.constant = torch.ones(4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def counting(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.steps += 1
    return model.a(x) * model.steps if model.steps < 3 else model.b(x)


def listing(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen.append(len(model.seen))
    model.settings["power"] = len(model.seen)
    return model.a(x) ** model.settings["power"]


def layer_drop(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.a(x) if random.random() < 0.5 else x
    return model.b(x) if np.random.rand() < 0.5 else x


def named(model: Any, a: Any = None, b: Any = None) -> torch.Tensor:
    return model.a(a) if a is not None else model.b(b)


def hooked(model: nn.Module) -> Any:
    handle = model.a.register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[union-attr, operator]
    found = model(X)
    handle.remove()
    return found


def changed(name: str, value: Any) -> Call:
    def call(model: nn.Module) -> Any:
        before = model(X)
        setattr(model, name, value)
        return before, model(X)

    return call


def edited(edit: Callable[[Any], None]) -> Call:
    def call(model: nn.Module) -> Any:
        before = model(X)
        edit(model)
        return before, model(X)

    return call


def function(code: Callable[..., torch.Tensor]) -> Callable[[], Model]:
    return lambda: Model(code)


# what the model does, and the calls that are made of it
CASES: dict[str, tuple[Callable[..., Any], list[Call]]] = {
    "a flag": (lambda m, x, f: m.a(x) if f else m.b(x), [lambda m: m(X, True), lambda m: m(X, False)]),
    "a number": (lambda m, x, n: m.a(x) * n, [lambda m: m(X, 1), lambda m: m(X, 7), lambda m: m(X, 1)]),
    "one and true": (
        lambda m, x, n: m.a(x) if n is True else m.b(x),
        [lambda m: m(X, 1), lambda m: m(X, True)],
    ),
    "minus zero": (
        lambda m, x, n: m.a(x) if str(n) == "0.0" else m.b(x),
        [lambda m: m(X, 0.0), lambda m: m(X, -0.0)],
    ),
    "a name": (named, [lambda m: m(a=X), lambda m: m(b=X), lambda m: m(X)]),
    "a string": (lambda m, x, s: getattr(m, s)(x), [lambda m: m(X, "a"), lambda m: m(X, s="b")]),
    "a list": (lambda m, x, s: m.a(x) * sum(s), [lambda m: m(X, [1, 2]), lambda m: m(X, [4])]),
    "structure": (
        lambda m, x: m.a(x[0]) if isinstance(x, tuple) else m.b(x["x"]),
        [lambda m: m((X,)), lambda m: m({"x": X})],
    ),
    "a dataclass": (
        lambda m, x, o: m.a(x) * o.power,
        [lambda m: m(X, Options(2)), lambda m: m(X, Options(3)), lambda m: m(X, Options(2))],
    ),
    "an array": (
        lambda m, x, t: m.a(x) * float(t[0]),
        [lambda m: m(X, np.array([2.0])), lambda m: m(X, np.array([3.0]))],
    ),
    "an iterator": (
        lambda m, x, i: m.a(x) * next(i),
        [lambda m: m(X, iter([2, 3])), lambda m: m(X, iter([5, 3]))],
    ),
    "strides": (
        lambda m, x: m.a(x) if x.is_contiguous() else m.b(x),
        [
            lambda m: m(torch.ones(4, 4)),
            lambda m: m(torch.ones(4, 4).T),
            lambda m: m(torch.ones(4, 4)[:, ::1].T),
        ],
    ),
    "one tensor twice": (
        lambda m, q, k: m.a(q) if q is k else m.b(k),
        [lambda m: m(X, X), lambda m: m(X, X.clone())],
    ),
    "the mode of a part": (
        lambda m, x: m.a(x) if m.drop.training else m.b(x),
        [lambda m: m.eval()(X), lambda m: (m.drop.train(), m(X))[1], lambda m: (m.drop.eval(), m(X))[1]],
    ),
    "an attribute": (lambda m, x: m.a(x) * m.scale, [changed("scale", 3.0)]),
    "an attribute of an object": (
        lambda m, x: m.a(x) * m.options.power,
        [edited(lambda m: setattr(m.options, "power", 3))],
    ),
    "an item of a list": (lambda m, x: m.a(x) * len(m.seen), [edited(lambda m: m.seen.append(1))]),
    "an item of a dict": (
        lambda m, x: m.a(x) * m.settings["power"],
        [edited(lambda m: m.settings.update(power=3))],
    ),
    "an array in place": (
        lambda m, x: m.a(x) * float(m.table[0]),
        [edited(lambda m: m.table.__setitem__(0, 3.0))],
    ),
    "a constant in place": (lambda m, x: m.a(x) * m.constant, [edited(lambda m: m.constant.mul_(3))]),
    "a constant": (lambda m, x: m.a(x) * m.constant, [changed("constant", torch.zeros(4))]),
    "a layer": (lambda m, x: m.a(x), [edited(lambda m: setattr(m, "a", nn.Identity()))]),
    "a hook": (lambda m, x: m.a(x), [lambda m: m(X), hooked, lambda m: m(X)]),
    "gradients": (
        lambda m, x: m.a(x) if torch.is_grad_enabled() else m.b(x),
        [lambda m: m(X), torch.no_grad()(lambda m: m(X)), lambda m: m(X)],
    ),
    "a counter": (counting, [lambda m: m(X)] * 4),
    "a counter set back": (counting, [lambda m: m(X), changed("steps", 0), lambda m: m(X)]),
    "a list of calls": (listing, [lambda m: m(X)] * 3),
    "LayerDrop": (layer_drop, [lambda m: m(X)] * 6),
}


def outcome(model: nn.Module, calls: list[Call], original: Model) -> tuple[list[Any], list[Any]]:
    """Outputs, and the model's Python state with that of the random numbers."""
    random.seed(5)
    np.random.seed(5)
    found = [call(model) for call in calls]
    state = [original.steps, original.seen, original.settings, original.options.power, original.training]
    return found, [*state, random.random(), np.random.rand()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:forward changes", "ignore:forward draws")
def test_a_prepared_model_computes_what_the_model_computes(name: str) -> None:
    code, calls = CASES[name]
    model = Model(code)
    eager = copy.deepcopy(model)
    prepared: Any = ampaudit.prepare(model, policy="apex-o0").model

    class Through(nn.Module):  # attributes are the model's, calls the prepared one's
        def __getattr__(self, attribute: str) -> Any:
            return getattr(model, attribute)

        def __setattr__(self, attribute: str, value: Any) -> None:
            setattr(model, attribute, value)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return prepared(*args, **kwargs)

        def train(self, mode: bool = True) -> Any:
            prepared.train(mode)
            return self

    through = Through.__new__(Through)
    found, expected = outcome(through, calls, model), outcome(eager, calls, eager)
    assert found[1] == expected[1]
    values = [
        [tensor.tolist() for tensor in torch.utils._pytree.tree_leaves(side[0])] for side in (found, expected)
    ]
    for ours, theirs in zip(*values, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert any(value != values[1][0] for value in values[1]), "the calls do not differ"


def test_assigned_buffers_go_on() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = 0.5 * self.average + x.mean(0)
            return x + self.average

    model = nn.Sequential(nn.Linear(4, 4), Averaging())
    eager = copy.deepcopy(model)
    prepared: Any = ampaudit.prepare(model, policy="apex-o0").model
    for _ in range(3):
        torch.testing.assert_close(prepared(X), eager(X))
        torch.testing.assert_close(model[1].average, eager[1].average)
    assert len(prepared._ampaudit_compiled) == 1


def test_equal_calls_share_a_trace() -> None:
    model: Any = ampaudit.prepare(Model(lambda m, x, n: m.a(x) * n), policy="apex-o0").model
    for _ in range(2):
        for n in (1, 2):
            model(X, n)
    assert len(model._ampaudit_compiled) == 2


def big(scale: float, *, at: int) -> Callable[..., torch.Tensor]:
    """Overflows in the call of that number."""

    def code(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.steps += 1
        return model.a(x) * (scale if model.steps == at else 1.0)

    return code


def test_a_scan_audits_each_branch() -> None:
    model = Model(lambda m, x, f: m.a(x) * 1e6 if f else m.b(x))
    safe = ampaudit.scan(model, batches=[(X, False)])
    assert safe.exit_code == 0
    for flags in ((False, True), (True, False)):
        report = ampaudit.scan(model, batches=[(X, flag) for flag in flags], policy="half")
        assert report.exit_code == 1
        assert next(f.site for f in report.findings if f.severity.value == "error") == "(top)/mul"
        assert {site.site for site in report.sites} >= {"a/linear", "b/linear"}


@pytest.mark.parametrize("policy", ["half", "onnx", "ampaudit"])
def test_a_scan_follows_a_counter(policy: str) -> None:
    model = Model(big(1e6, at=3))
    assert ampaudit.scan(model, batches=[X] * 2, policy=policy).exit_code == 0
    report = ampaudit.scan(model, batches=[X] * 3, policy=policy)
    # a converter clips the factor, which makes the output wrong
    assert report.exit_code == (0 if policy == "ampaudit" else 1)
    assert any("steps" in note for note in report.notes)
    peak = next(site.forward.peak for site in report.sites if site.site == "(top)/mul")
    assert peak > 1e5
    assert model.steps == 0


def test_a_scan_draws_other_numbers_for_each_batch() -> None:
    def code(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.a(x) * 1e6 if random.random() < 0.5 else model.b(x)

    codes = [ampaudit.scan(Model(code), X, policy="half", seed=seed).exit_code for seed in range(8)]
    expected = [int(random.Random(seed).random() < 0.5) for seed in range(8)]
    assert codes == expected
    assert 0 < sum(expected) < 8
    report = ampaudit.scan(Model(code), batches=[X] * 8, policy="half")
    assert report.exit_code == 1
    assert {site.site for site in report.sites} >= {"a/linear", "b/linear"}


def test_policies_side_by_side_see_the_same_states() -> None:
    source = as_source(Model(big(1e6, at=2)), batches=[X, X])
    alone = [scan(source, policy=policy, dtype="float16").exit_code for policy in ("half", "apex-o0")]
    from ampaudit.audit.config import ScanConfig
    from ampaudit.audit.scan import scan_policies

    both = scan_policies(source, ["half", "apex-o0"], ScanConfig())
    assert [report.exit_code for report in both] == alone == [1, 0]


def test_stored_tensors_are_said() -> None:
    def code(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.last = model.a(x)
        return model.last * 2

    report = ampaudit.scan(Model(code), X)
    assert any("last" in note for note in report.notes)
    prepared: Any = ampaudit.prepare(Model(code), policy="apex-o0").model
    with pytest.warns(UserWarning, match="stores tensors or objects in last"):
        prepared(X)
    prepared(X)  # once is enough


def test_the_check_is_fast() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout()])
            self.settings = {"scale": 1.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return x

    model = nn.Sequential(*[Block() for _ in range(100)])
    assert sum(1 for _ in model.modules()) == 501
    state, key = PythonState(model), call_key((X,), {"mask": X})
    seconds, forward = [], []
    for _ in range(50):
        started = time.perf_counter()
        same = state.unchanged(), call_key((X,), {"mask": X}) == key
        seconds.append(time.perf_counter() - started)
        assert same == (True, True)
        started = time.perf_counter()
        model(torch.ones(2, 2))
        forward.append(time.perf_counter() - started)
    assert min(seconds) < min(forward) / 2  # 0.3 ms of 5 ms
    model[50].parts[2].p = 0.1
    assert not state.unchanged()
