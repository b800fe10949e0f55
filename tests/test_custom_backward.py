"""The author's own ways back against real autograd, in FP32, in real half modules and under real autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import own_backwards as own
from tests.own_backwards import WIDTH, Block, Net
from tests.test_gradients import Kept, audit


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(7))


def smooth(output: Any) -> torch.Tensor:
    """A loss with a gradient of its own for every element."""
    weights = torch.sin(torch.arange(output.numel())).view(output.shape)
    return (output.float() * weights).square().sum() * 0.1


def net(function: Callable[..., Any], *parameters: torch.Tensor) -> Callable[[], nn.Module]:
    return lambda: Net(function, *(nn.Parameter(p.clone()) for p in parameters))


def both(x: torch.Tensor) -> torch.Tensor:
    sine, cosine, sign = own.TwoOutputs.apply(x)
    return sine + 2 * cosine * sign


def used_twice(x: torch.Tensor) -> torch.Tensor:
    return own.Swish.apply(own.Swish.apply(x)) + own.Swish.apply(x * 2)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    made = own.AddsInPlace.apply(y, x)
    return made * y  # y is what was written


def on_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    own.AddsInPlace.apply(y[:, :8], x[:, 8:])
    return y


def hooked(x: torch.Tensor) -> torch.Tensor:
    """Both uses of the value pass the hooks, also the one before they are there."""
    before = x.tanh()
    x.register_hook(lambda gradient: gradient * 3)
    x.register_hook(lambda gradient: None)
    x.retain_grad()
    removed = x.register_hook(lambda gradient: gradient * 100)
    removed.remove()
    return before * x


def hooked_then_written(x: torch.Tensor) -> torch.Tensor:
    """A hook is for the value that was there when it was registered."""
    y = x * 2
    y.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    y.mul_(3)
    return y


def module_hooks(kind: str) -> nn.Module:
    model = Net(lambda x: x)
    model.between = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    if kind == "full":
        model.between.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 0.5 + outputs[0],))
    if kind == "before":
        model.between.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 2,))
    if kind == "all":
        model.between[0].register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 2,))
        model.between[0].register_full_backward_hook(lambda m, inputs, outputs: (outputs[0].tanh(),))
        model.between.register_full_backward_hook(lambda m, inputs, outputs: None)
        model.register_full_backward_hook(lambda m, inputs, outputs: None)  # no input asks for a gradient
    return model


def parameter_hook() -> nn.Module:
    model = Net(torch.tanh)
    scale = torch.linspace(0, 2, WIDTH)
    model.first.weight.register_hook(lambda gradient: gradient * scale.to(gradient.dtype))
    return model


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.f, self.g = nn.Linear(WIDTH // 2, WIDTH // 2), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(WIDTH, 4)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(own.Half.apply(own.Half.apply(x, self.f, self.g), self.f, self.g))


def blocks(reentrant: bool | None) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(reentrant), Block(reentrant), nn.Linear(WIDTH, 4))


def by_hand(bias: bool) -> nn.Module:
    weight = torch.linspace(-0.4, 0.4, WIDTH * WIDTH).view(WIDTH, WIDTH)
    if bias:
        return net(own.LinearByHand.apply, weight, torch.linspace(-1, 1, WIDTH))()
    return net(lambda x, w: own.LinearByHand.apply(x, w, None), weight)()


CASES: dict[str, Callable[[], nn.Module]] = {
    "straight through": net(lambda x: own.StraightThrough.apply(x, 0.25)),
    "quantizer": net(lambda x, s: own.Quantizer.apply(x, s, 4), torch.tensor([0.11])),
    "reversal": net(lambda x: own.Reversal.apply(x, 0.5)),
    "amplified": net(lambda x: own.Amplified.apply(x, 30.0)),
    "clipped": net(own.Clipped.apply),
    "masked in place": net(own.MaskedInPlace.apply),
    "swish": net(own.Swish.apply),
    "saved sigmoid": net(own.SavedSigmoid.apply),
    "gelu": net(own.Gelu.apply),
    "exp": net(own.Exp.apply),
    "linear": lambda: by_hand(True),
    "linear without bias": lambda: by_hand(False),
    "two outputs": net(both),
    "one output unused": net(lambda x: own.Unmaterialized.apply(x)[1]),
    "both outputs used": net(lambda x: sum(own.Unmaterialized.apply(x))),
    "output of zeros": net(lambda x: own.TwoOutputs.apply(x)[0]),
    "in place": net(in_place),
    "in place on a view": net(on_a_view),
    "used three times": net(used_twice),
    "nested": net(own.Outer.apply),
    "broadcast": net(own.Broadcast.apply, torch.linspace(0.5, 2, WIDTH)),
    "reversible": Reversible,
    "hook": net(hooked),
    "hook, then written": net(hooked_then_written),
    "hook of a parameter": parameter_hook,
    "module hook": lambda: module_hooks("full"),
    "module pre-hook": lambda: module_hooks("before"),
    "all module hooks": lambda: module_hooks("all"),
    "checkpoint": lambda: blocks(False),
    "reentrant checkpoint": lambda: blocks(True),
}


def gradients(model: nn.Module, output: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (smooth(output) * scale).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.float() - second).norm() / second.norm().clamp(min=1e-30))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_autograds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32's to float32's accuracy; 16 bits' are those of a real half module but for a few roundings."""
    kept, x, scale = Kept(monkeypatch), rows(), 16.0
    record = audit(CASES[name](), (x,), loss=smooth, policy="half", scale=scale).record.gradients
    assert record is not None
    assert not record.unfollowed
    assert not record.unused
    exact = gradients(model := CASES[name](), model(x), scale)
    half = gradients(model := CASES[name]().half(), model(x.half()), scale)
    assert set(kept.pairs) == set(exact)
    for parameter, gradient in exact.items():
        reference, lower = kept.pairs[parameter]
        assert apart(reference, gradient) < 2e-6, parameter
        # the parts of a gradient that differ in their last bit: some 2^-11 of it; a sum may cancel
        error = apart(half[parameter], gradient)
        print(name, parameter, apart(reference, gradient), apart(lower, half[parameter]), error)
        assert apart(lower, half[parameter]) < max(1e-3, 0.5 * error), parameter
