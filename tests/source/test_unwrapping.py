"""Tests that compiled, parallel and scripted modules are audited as the Python modules inside."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampaudit
from ampaudit.core.errors import SourceError
from ampaudit.source.unwrapping import unwrapped


class Block(nn.Module):
    """Overflows float16 at a known line."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.linear(x)) + 1.0
        x = x * 1e5  # planted
        return x / 1e5


class Model(nn.Module):
    """A block between two layers."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), block, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.block(self.first(x))))


class Calling(nn.Module):
    """Calls a compiled function in a method that must not be compiled."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.block, self.double = Block(), wrap(lambda x: x * 2)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.block(self.double(x)))


def in_place(block: nn.Module) -> nn.Module:
    block.compile()
    return block


def method(block: nn.Module) -> nn.Module:
    block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    return block


def in_script(block: nn.Module) -> nn.Module:
    return torch.jit.script(block)  # type: ignore[no-any-return]


def loaded(block: nn.Module) -> nn.Module:
    torch.jit.save(torch.jit.script(block), file := io.BytesIO())
    file.seek(0)
    return torch.jit.load(file)  # type: ignore[no-any-return]


COMPILED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "model": (lambda: torch.compile(Model(Block())), "block"),
    "block": (lambda: Model(torch.compile(Block())), "block"),
    "in place": (lambda: in_place(Model(in_place(Block()))), "block"),
    "method": (lambda: Model(method(Block())), "block"),
    "nested": (
        lambda: Model(torch.compile(nn.Sequential(nn.Sequential(torch.compile(Block()))))),
        "block.0.0",
    ),
    "parallel": (lambda: Model(nn.DataParallel(torch.compile(Block()))), "block"),
    "functions": (lambda: Calling(torch.compile), "block"),
    "scripted model": (lambda: in_script(Model(Block())), "block"),
    "scripted block": (lambda: Model(in_script(Block())), "block"),
    "scripted in a sequence": (lambda: nn.Sequential(nn.Sequential(in_script(Block()))), "0.0"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPILED)
def test_the_planted_line_is_found_under_the_plain_name_of_its_layer(name: str) -> None:
    make, layer = COMPILED[name]
    model, x = make(), torch.randn(4, 8)
    state = {key: (tensor.data_ptr(), tensor.clone()) for key, tensor in model.state_dict().items()}
    report = ampaudit.scan(model, x, policy="half", device="cpu")
    planted = Block.forward.__code__.co_firstlineno + 2
    found = [(f.layer or "(top)", f.source and f.source.line) for f in report.findings if f.code == "AMP101"]
    assert found == [(layer, planted)]
    assert not any("_orig_mod" in site.site for site in report.sites)
    after = model.state_dict()
    assert all(after[k].data_ptr() == p and torch.equal(after[k], t) for k, (p, t) in state.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "block",
    [lambda: torch.jit.trace(Block(), torch.ones(4, 8)), lambda: loaded(Block())],
    ids=["traced", "loaded"],
)
def test_a_graph_without_its_python_code_is_refused_by_name(block: Callable[[], nn.Module]) -> None:
    with pytest.raises(SourceError, match="layer block is TorchScript that was traced, frozen or loaded"):
        ampaudit.scan(Model(block()), torch.randn(4, 8), policy="half", device="cpu")


class Various(nn.Module):
    """What TorchScript keeps in different ways: lists, buffers, numbers, recurrent layers, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm, self.lstm, self.attention = (
            nn.BatchNorm1d(8),
            nn.LSTM(8, 8, 2),
            nn.MultiheadAttention(8, 2),
        )
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.factor, self.sizes = 3.0, [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = self.lstm((self.norm(x) + self.shift)[None])[0]
        return self.attention(x, x, x)[0] * self.factor + self.sizes[1]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [False, True])
def test_a_scripted_module_is_rebuilt(training: bool) -> None:
    model, x = Various().train(training), torch.randn(4, 8)
    rebuilt = unwrapped(in_script(model))
    assert type(rebuilt) is Various
    assert all(module.training == training for module in rebuilt.modules())
    assert dict(rebuilt.named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert dict(rebuilt.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert torch.allclose(rebuilt(x), model(x), atol=1e-6)


def test_ties_between_wrappers_survive() -> None:
    model = Model(torch.compile(Block()))
    model.first = model.block
    found = unwrapped(model)
    assert isinstance(found, Model)
    assert type(found.block) is Block
    assert found.first is found.block
    assert found.block.linear.weight is model.block.linear.weight
    assert "_orig_mod" in str(model)


def test_a_plain_model_stays_itself() -> None:
    model = Model(Block())
    assert unwrapped(model) is model
