"""Structural copies: what deepcopy gives where it works, and nothing shared that could be changed."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations

from ampaudit.audit.scan import scan
from ampaudit.trace.isolation import structural_copy
from ampaudit.trace.state import PythonState
from tests.support import zoo


def weight_normed() -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 4))


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    log: list[float] = dataclasses.field(default_factory=list)


class Unpicklable:
    """A plain object that refuses to be pickled, and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock = threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle")


class Closing:
    """Releases a handle when it is collected: a second object would release it twice."""

    closed = 0

    def __del__(self) -> None:
        Closing.closed += 1


class Odd(nn.Module):
    """Holds what deepcopy refuses, and counts in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_normed()
        self.lock = threading.Lock()
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.stream = (i for i in range(9))
        self.generator = torch.Generator().manual_seed(1)
        self.unpicklable = Unpicklable()
        self.closing = Closing()
        self.settings = Settings()
        self.step = 0
        self.counts = collections.Counter()
        self.recent: collections.deque[int] = collections.deque(maxlen=2)
        self.nested = {"locked": [threading.Lock(), 0], "seen": {0}}
        self.double = functools.partial(torch.mul, other=2.0)
        self.act: Callable[..., Any] = torch.relu
        self.same = self.linear
        self.register_buffer("calls", torch.zeros(()))
        results: list[int] = []
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1
            results.append(calls)

        self.linear.register_forward_hook(count)
        self.read = lambda: (calls, results)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        self.counts["x"] += 1
        self.recent.append(self.step)
        self.nested["locked"][1] += 1
        self.nested["seen"].add(self.step)
        self.settings.log.append(self.settings.scale)
        self.unpicklable.calls += 1
        self.calls += 1
        noise = torch.rand((), generator=self.generator)
        with self.lock:
            return self.act(self.double(self.linear(x))) + noise


def state(model: Odd) -> list[Any]:
    return [
        *(
            model.step,
            dict(model.counts),
            list(model.recent),
            model.nested["locked"][1],
            model.nested["seen"],
        ),
        *(list(model.settings.log), model.unpicklable.calls, float(model.calls), copy.deepcopy(model.read())),
        model.generator.get_state().tolist(),
    ]


@pytest.fixture
def odd() -> Iterator[Odd]:
    model = Odd()
    yield model
    model.file.close()


def test_a_run_of_the_copy_changes_nothing_of_the_model(odd: Odd) -> None:
    with pytest.raises(Exception, match=r"deepcopy|pickle"):
        copy.deepcopy(odd)
    made = structural_copy(odd)
    before, x = state(odd), torch.randn(2, 4)
    first, second = made(x), made(x)
    assert state(odd) == before
    assert state(made) != before
    assert made.step == len(made.settings.log) == made.read()[0] == len(made.read()[1]) == 2
    assert torch.equal(odd(x), first)  # the same weights, and the same random numbers
    assert torch.equal(odd(x), second)
    assert state(odd) == state(made)


def test_what_cannot_be_copied_is_shared_and_ties_are_kept(odd: Odd) -> None:
    closed = Closing.closed
    made = structural_copy(odd)
    for name in ("lock", "file", "stream", "closing", "act"):
        assert getattr(made, name) is getattr(odd, name), name
    assert made.nested["locked"][0] is odd.nested["locked"][0]
    assert made.same is made.linear is not odd.linear
    assert made.recent.maxlen == 2
    assert isinstance(made.counts, collections.Counter)
    del made
    assert Closing.closed == closed


def test_a_patched_forward_runs_the_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    inner, calls = model.forward, []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(model)
        return inner(x) + 1

    model.forward = forward  # type: ignore[method-assign]
    made = structural_copy(model)
    with torch.no_grad():
        made[0].weight.zero_()
        made[0].bias.zero_()
    assert torch.equal(made(torch.ones(1, 3)), torch.ones(1, 3))
    assert calls == []
    assert not torch.equal(model(torch.ones(1, 3)), torch.ones(1, 3))


def test_builtin_methods_follow_their_owner() -> None:
    model, outputs = nn.Linear(2, 2), []
    model.keep = outputs.append
    model.outputs = outputs
    made = structural_copy(model)
    made.keep(1)
    assert (outputs, made.outputs) == ([], [1])


def test_replaced_tensors_are_used_wherever_they_are() -> None:
    model = nn.GRU(3, 3)
    model.listed = [model.weight_hh_l0]
    shared = {id(p): p for p in model.parameters()}
    made = structural_copy(model, shared)
    assert all(a is b for a, b in zip(made.parameters(), model.parameters(), strict=True))
    other = {key: nn.Parameter(torch.zeros_like(value)) for key, value in shared.items()}
    zeroed = structural_copy(model, other)
    assert zeroed.listed[0] is zeroed.weight_hh_l0 is other[id(model.weight_hh_l0)]
    assert not zeroed(torch.ones(2, 1, 3))[0].any()


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lstm": lambda: (nn.LSTM(3, 4, 2, bidirectional=True), torch.randn(5, 2, 3)),
    "parametrized": lambda: (parametrizations.weight_norm(nn.Linear(3, 3)), torch.randn(2, 3)),
    "spectral": lambda: (parametrizations.spectral_norm(nn.Linear(3, 3)), torch.randn(2, 3)),
    "old weight norm": lambda: (weight_normed(), torch.randn(2, 4)),
    "graph module": lambda: (fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3))), torch.randn(2, 3)),
    "script": lambda: (torch.jit.script(nn.Linear(3, 3)), torch.randn(2, 3)),
    "tied": lambda: (zoo.gpt2().model.eval(), zoo.gpt2().kwargs),
    "bert": lambda: (zoo.bert().model.eval(), zoo.bert().kwargs),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_it_computes_what_the_model_computes(name: str) -> None:
    model, given = MODELS[name]()
    made = structural_copy(model)
    outputs = [m(**given) if isinstance(given, dict) else m(given) for m in (model, made)]
    first, second = (
        [t for t in torch.utils._pytree.tree_leaves(o) if isinstance(t, torch.Tensor)] for o in outputs
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    own = {id(p) for p in model.parameters()}
    assert not any(id(p) in own for p in made.parameters())
    ties = [[id(p) for _, p in m.named_parameters(remove_duplicate=False)] for m in (model, made)]
    assert len(set(ties[0])) == len(set(ties[1]))
    assert list(model.state_dict()) == list(made.state_dict())


def test_models_that_deepcopy_refuses_are_audited(odd: Odd) -> None:
    odd.forward = types.MethodType(lambda self, x: self.act(self.double(self.linear(x))), odd)  # type: ignore[method-assign]
    with torch.no_grad():
        odd.linear.bias.fill_(60000.0)
    report = scan(odd, torch.rand(2, 4), policy="half")
    assert report.exit_code == 1
    assert next(f.site for f in report.findings if f.severity.value == "error") == "(top)/mul"


@pytest.mark.parametrize("policy", ["half", "onnx", "torch-cuda"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_old_weight_norm_is_audited(policy: str, mode: bool) -> None:
    model = nn.Sequential(weight_normed(), nn.ReLU(), weight_normed()).train(mode)
    report = scan(model, torch.rand(2, 4), policy=policy)
    assert (report.exit_code, report.notes) == (0, ())
    with torch.no_grad():
        model[0].weight_g.fill_(1e5)
    report = scan(model, torch.rand(2, 4), policy=policy)
    assert report.exit_code == 1


class Carrying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.carried = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.carried = self.carried * 0.5 + x.mean(0)
        return x + self.carried


class CarryingInList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.carried = [torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.carried[0] = self.carried[0] * 0.5 + x.mean(0)
        return x + self.carried[0]


@pytest.mark.parametrize("kind", [Carrying, CarryingInList])
def test_a_tensor_that_the_next_call_reads_is_said(kind: type[nn.Module]) -> None:
    report = scan(nn.Sequential(nn.Linear(4, 4), kind()), torch.rand(2, 4))
    assert report.notes == (
        "forward stores tensors or objects in 1.carried: each call is traced without them",
    )


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = [torch.zeros(2, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = [x * 2]
        return self.last[0]


class PackedLSTM(nn.Module):
    """The list of its parameters is made again when they are exchanged for a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[:, None], torch.tensor([1, 1]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("kind", [Recomputing, PackedLSTM])
def test_tensors_that_each_call_stores_again_are_not_said(kind: type[nn.Module]) -> None:
    assert scan(nn.Sequential(nn.Linear(4, 4), kind()).eval(), torch.rand(2, 4)).notes == ()


class Scaled(nn.Module):
    """Its function counts its calls in a variable of its own; another variable is not set yet."""

    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def scaled(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * (calls if calls < 9 else last)

        self.function = scaled
        if calls:
            last = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_a_variable_of_a_closure_is_state() -> None:
    model = Scaled()
    state = PythonState(model)
    assert state.unchanged()
    model(torch.ones(2))
    assert not state.unchanged()
    (change,) = state.changes()
    assert change.name == "function"
    assert [change.before.cell_contents, change.after.cell_contents] == [0, 1]


def test_a_global_hook_that_code_adds_is_a_change() -> None:
    state = PythonState(nn.ReLU())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        (change,) = state.changes()
    finally:
        handle.remove()
    assert change.name.startswith("torch.nn")
    assert [len(change.before), len(change.after)] == [0, 1]
