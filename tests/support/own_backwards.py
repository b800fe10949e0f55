"""Models that define their own backward: custom functions, hooks, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class StraightThrough(Function):
    """Rounds to quarters; the gradient does not see it. New style: no ctx in forward."""

    @staticmethod
    def forward(x: torch.Tensor, step: float) -> torch.Tensor:
        return torch.round(x / step) * step

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Quantizer(Function):
    """Fake quantization with a learned scale: the gradient is cut off where values saturate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
        high = 2 ** (bits - 1) - 1
        level = torch.clamp(torch.round(x / scale), -high - 1, high)
        ctx.save_for_backward(x, scale)
        ctx.level, ctx.high = level, high
        return level * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scale = ctx.saved_tensors
        inside = ((x / scale).abs() <= ctx.high).to(gradient.dtype)
        of_scale = (gradient * (ctx.level - inside * x / scale)).sum()
        return gradient * inside, of_scale.reshape(scale.shape), None


class Reversal(Function):
    """Gradient reversal; a number as an argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.neg() * ctx.factor, None


class Clipped(Function):
    """Passes its input on as it is, and clips the gradient's norm and its elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        norm = gradient.float().norm()
        return (gradient / torch.clamp(norm * 4.0, min=1.0).to(gradient.dtype)).clamp_(-0.1, 0.1)


class MaskedInPlace(Function):
    """Zeroes elements of a copied gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        made = gradient.clone()
        made[x < 0] = 0
        made[:, :2] *= 0.5
        return made


class Swish(Function):
    """Saves its input only, and computes the sigmoid again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s * (1 + x * (1 - s)))


class SavedSigmoid(Function):
    """Saves an intermediate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, s = ctx.saved_tensors
        return gradient * (s + x * s * (1 - s))


class Gelu(Function):
    """The tanh form, by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        t = torch.tanh(0.79788456 * (x + 0.044715 * x**3))
        ctx.save_for_backward(x, t)
        return 0.5 * x * (1 + t)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, t = ctx.saved_tensors
        inner = 0.79788456 * (1 + 3 * 0.044715 * x * x)
        return gradient * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


class Exp(Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


class LinearByHand(Function):
    """Asks which gradients are wanted; the bias may be missing."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ weight
        if ctx.needs_input_grad[1]:
            of_weight = gradient.t() @ x
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        return of_x, of_weight, of_bias


class CastInputs(Function):
    """Asks autocast for float32, and gets it."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class CrossEntropy(Function):
    """A loss whose gradient is softmax minus one-hot; targets are integers."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        chances = torch.softmax(logits.float(), -1)
        ctx.save_for_backward(chances, target)
        ctx.dtype = logits.dtype
        return -chances.gather(1, target[:, None]).log().mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        chances, target = ctx.saved_tensors
        made = chances.clone()
        made[torch.arange(len(target)), target] -= 1
        return (made * (gradient / len(target))).to(ctx.dtype), None


class TwoOutputs(Function):
    """Sine and cosine, and the sign, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        sign = x > 0
        ctx.mark_non_differentiable(sign)
        return x.sin(), x.cos(), sign

    @staticmethod
    def backward(ctx: Any, of_sine: Any, of_cosine: Any, of_sign: Any) -> torch.Tensor:
        assert of_sign is not None
        (x,) = ctx.saved_tensors
        return of_sine * x.cos() - of_cosine * x.sin()


class Unmaterialized(Function):
    """Two outputs, of which one may be unused: then there is no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        if first is None or second is None:
            return second * 3 if first is None else first * 2
        return first * 2 + second * 3 + 0.25  # which zeros in the place of None would show


class OfTheFirst(Function):
    """A product that gives its second factor no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradient * y, None


class WritesOnTheWay(Function):
    """Halves its weight, and the gradient that it is given, when it goes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        weight.mul_(0.5)
        return gradient.mul_(0.5) * weight, None


class AddsInPlace(Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        x.add_(y.tanh())
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (y,) = ctx.saved_tensors
        return gradient, gradient * (1 - y.tanh() ** 2)


class Outer(Function):
    """Calls another function, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return Swish.apply(x) * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = Swish.apply(leaf) * 2
        (made,) = torch.autograd.grad(y, leaf, gradient)
        return made


class Recomputed(Function):
    """Drops what autograd has saved before it is asked for: the result of exp is in C++ only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp().sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = leaf.exp().sigmoid()
        y.backward(gradient)
        assert leaf.grad is not None
        return leaf.grad


class Half(Function):
    """One half of a reversible block: its weights get their gradients inside, as in Reformer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: nn.Module, g: nn.Module) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        first = first + f(second)
        second = second + g(first)
        y = torch.cat([first, second], -1)
        ctx.save_for_backward(y.detach())
        ctx.f, ctx.g = f, g
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (y,) = ctx.saved_tensors
        first, second = y.chunk(2, -1)
        of_first, of_second = gradient.chunk(2, -1)
        with torch.enable_grad():
            leaf = first.detach().requires_grad_()
            made = ctx.g(leaf)
            torch.autograd.backward(made, of_second)
        before = second - made.detach()
        of_first = of_first + leaf.grad
        with torch.enable_grad():
            other = before.detach().requires_grad_()
            ctx.f(other).backward(of_first)
        return torch.cat([of_first, of_second + other.grad], -1), None, None


class Broadcast(Function):
    """Returns a gradient of the output's shape for a vector: autograd sums it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gain = ctx.saved_tensors
        return gradient * gain, gradient * x


class Amplified(Function):
    """Passes its input on; the gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class TakesValue(Function):
    """Asks for a value, so that no trace can follow it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Any = None) -> torch.Tensor:
        ctx.owner = owner
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        if gradient.abs().max() > 1e-3:
            return gradient * x.exp(), None
        return gradient * 2, None


class InFloat32(Function):
    """Computes its gradient in float32; what autograd casts to the input's dtype is too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.float() * 1e9


class PassesThroughTooMuch(Function):
    """What is too large is an intermediate: divided again, it would fit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        large = gradient * 1e8
        return large * 1e-8 * x.exp()


class Vjp(Function):
    """The other name of a backward."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vjp(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * 2


class Mapped(Function):
    """May be called inside vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1, 1) * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.clamp(-1, 1) * 2


class OnContext(Function):
    """Keeps tensors as attributes, in a list and in a dictionary."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.one, ctx.more = x.tanh(), [x.sin(), {"cosine": x.cos()}]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.one + ctx.more[0] * gradient * ctx.more[1]["cosine"]


class Net(nn.Module):
    """Two linear layers and something between them."""

    def __init__(self, between: Callable[..., Any], *parameters: torch.Tensor, out: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, out)
        self.extra = nn.ParameterList(parameters)
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.between(self.first(x), *self.extra))


class Block(nn.Module):
    """A residual block, which may be recomputed in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)
