"""Custom backwards compared with real autograd, in FP32, in real half modules and under real autocast."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampaudit
from ampaudit.core.formats import BFLOAT16
from tests.support import own_backwards as own
from tests.support.backward import Kept, audit
from tests.support.own_backwards import WIDTH, Block, Net


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
    "cast inputs": net(own.CastInputs.apply, torch.linspace(-0.4, 0.4, WIDTH * WIDTH).view(WIDTH, WIDTH)),
    "two outputs": net(both),
    "one output unused": net(lambda x: own.Unmaterialized.apply(x)[1]),
    "both outputs used": net(lambda x: sum(own.Unmaterialized.apply(x))),
    "output of zeros": net(lambda x: own.TwoOutputs.apply(x)[0]),
    "a function without a gradient for it": net(lambda x: own.OfTheFirst.apply(*own.TwoOutputs.apply(x)[:2])),
    "in place": net(in_place),
    "in place on a view": net(on_a_view),
    "used three times": net(used_twice),
    "nested": net(own.Outer.apply),
    "recomputed": net(own.Recomputed.apply),
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


def written(how: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Writes that autograd does not see: the gradient passes them as if they were not there."""

    def between(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if how == "off":
            with torch.no_grad():
                y.clamp_(-0.5, 0.5)
        elif how == "view":
            part = y[:, :8]
            with torch.no_grad():
                part.mul_(3)
            part.add_(x[:, 8:])
        elif how == "detached":
            y.detach()[:, 2:].mul_(3)
        elif how == "data":
            y.data.clamp_(-0.5, 0.5)
        else:
            y.data = y.data * 3
        return y * x

    return between


CASES |= {
    "tensors on the context": net(own.OnContext.apply),
    "vjp": net(own.Vjp.apply),
    "inside vmap": net(lambda x: torch.vmap(own.Mapped.apply)(x)),
    "run as a whole": net(own.TakesValue.apply),
    **{f"unseen write: {how}": net(written(how)) for how in ("off", "view", "detached", "data", "replaced")},
}


def gradients(model: nn.Module, output: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (smooth(output) * scale).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.float() - second).norm() / second.norm().clamp(min=1e-30))


class FirstKept(Kept):
    """Keeps the gradients of the first backward pass, before anything is repaired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.pairs = _Lasting()


class _Lasting(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.setdefault(key, value)


ignore_idle_hooks = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@ignore_idle_hooks
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_autograds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32's to float32's accuracy; 16 bits' are those of a real half module.

    Both differ from FP32 by some roundings (2^-11) of each element. Between them lies what kernels add up in
    another order, less than half of that; on the CPU that this was written on, nothing at all.
    """
    kept, x, scale = Kept(monkeypatch), rows(), 16.0
    record = audit(CASES[name](), (x,), loss=smooth, policy="half", scale=scale).record.parts["backward"]
    assert record is not None
    assert [way.instead for way in record.untraced] == (["as a whole"] if "whole" in name else [])
    assert not record.unused
    assert not record.notes
    exact = gradients(model := CASES[name](), model(x), scale)
    half = gradients(model := CASES[name]().half(), model(x.half()), scale)
    assert set(kept.pairs) == set(exact)
    for parameter, gradient in exact.items():
        reference, lower = kept.pairs[parameter]
        assert apart(reference, gradient) < 2e-6, parameter
        assert apart(lower, half[parameter]) < max(2.0**-12, 0.5 * apart(half[parameter], gradient)), (
            parameter
        )


UNARY: tuple[Callable[[torch.Tensor], Any], ...] = (
    *(own.Swish.apply, own.Gelu.apply, own.Exp.apply, own.Outer.apply, own.Recomputed.apply),
    *(own.Clipped.apply, own.MaskedInPlace.apply, own.Vjp.apply, own.OnContext.apply, own.TakesValue.apply),
    *(torch.tanh, both, in_place, on_a_view, hooked, hooked_then_written),
    *(written("off"), written("view"), written("data")),
)


def composed(draw: random.Random, depth: int = 0, within: bool = False) -> Callable[[torch.Tensor], Any]:
    """Functions, hooks and writes after each other, side by side and inside checkpoints."""
    kind = draw.choice(["one", "one", "after", "beside", "product", "checkpoint"]) if depth < 3 else "one"
    if kind == "one":  # a hook inside a checkpoint has a test of its own
        return draw.choice([f for f in UNARY if not within or f not in (hooked, hooked_then_written)])
    inside, reentrant = within or kind == "checkpoint", draw.random() < 0.5
    first, second = composed(draw, depth + 1, inside), composed(draw, depth + 1, inside)
    match kind:
        case "after":
            return lambda x: first(torch.tanh(second(x)))
        case "beside":
            return lambda x: torch.tanh(first(x)) + torch.tanh(second(x))
        case "product":
            return lambda x: first(x) * torch.sigmoid(second(x))
    return lambda x: checkpoint(lambda y: torch.tanh(first(y)), x, use_reentrant=reentrant)


@pytest.mark.parametrize("seed", range(12))
def test_gradients_of_compositions_are_autograds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounding of a composition is compared with its own error against FP32."""
    between = composed(random.Random(seed))
    make = net(lambda x: torch.tanh(between(x)))
    kept, x = Kept(monkeypatch), rows()
    audit(make(), (x,), loss=smooth, policy="half", scale=1.0)
    exact = gradients(model := make(), model(x))
    half = gradients(model := make().half(), model(x.half()))
    for parameter, gradient in exact.items():
        reference, lower = kept.pairs[parameter]
        assert apart(reference, gradient) < 1e-5, parameter
        assert apart(lower, half[parameter]) < max(1e-3, apart(half[parameter], gradient)), parameter


@ignore_idle_hooks
@pytest.mark.parametrize("name", [name for name in CASES if name != "reversible"])
def test_gradients_are_those_of_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on the CPU is the autocast that can be run here: a backward sees float32 weights in it."""
    kept, x = Kept(monkeypatch), rows()
    audit(CASES[name](), (x,), loss=smooth, policy="torch-cpu", scale=1.0, form=BFLOAT16)
    exact = gradients(model := CASES[name](), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = (model := CASES[name]())(x)
        loss = smooth(output)
    loss.backward()
    for parameter, value in model.named_parameters():
        assert value.grad is not None
        reference, ours = kept.pairs[parameter]
        assert apart(reference, exact[parameter]) < 2e-6, parameter
        assert apart(ours, value.grad) < max(2.0**-9, 0.5 * apart(value.grad, exact[parameter])), parameter


@pytest.mark.parametrize("name", ["swish", "in place on a view", "two outputs", "hook", "module hook"])
def test_a_graph_that_is_replayed_keeps_its_ways_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter's policy decides on the whole FP32 graph, and replays it."""
    kept, x = Kept(monkeypatch), rows()
    audit(CASES[name](), (x,), loss=smooth, policy="onnx", scale=1.0)
    for parameter, gradient in gradients(model := CASES[name](), model(x)).items():
        reference, lower = kept.pairs[parameter]
        assert apart(reference, gradient) < 2e-6, parameter
        assert 0 < apart(lower, gradient) < 5e-3, parameter


def test_a_reentrant_checkpoint_draws_its_numbers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        made = blocks(True)
        for block in (made[1], made[2]):
            block.inner[1] = nn.Dropout(0.5)
        return made.train()

    kept, x = Kept(monkeypatch), rows()
    audit(model(), (x,), loss=smooth, scale=1.0)
    made = model()
    torch.manual_seed(0)  # of batch 0
    for parameter, gradient in gradients(made, made(x)).items():
        assert apart(kept.pairs[parameter][0], gradient) < 2e-6, parameter


def test_a_loss_may_have_a_backward_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])

    def model() -> nn.Module:
        return Net(torch.tanh)

    def loss(output: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = own.CrossEntropy.apply(output, target)
        return made

    kept, x = Kept(monkeypatch), rows()
    audit(model(), (x,), loss=loss, policy="half", scale=256.0)
    exact = F.cross_entropy((plain := model())(x), target) * 256.0
    for gradient, (name, _) in zip(
        torch.autograd.grad(exact, list(plain.parameters())), plain.named_parameters(), strict=True
    ):
        assert apart(kept.pairs[name][0], gradient) < 1e-6, name
    for made, side, data in ((model(), 0, x), (model().half(), 1, x.half())):
        (loss(made(data)) * 256.0).backward()
        for parameter, value in made.named_parameters():
            assert value.grad is not None
            assert apart(kept.pairs[parameter][side], value.grad.float()) < (1e-6, 5e-4)[side], parameter


def planted(kind: str) -> nn.Module:
    """A gradient overflow in the middle of three blocks."""
    torch.manual_seed(2)
    model = nn.Sequential(*(Net(torch.tanh, out=WIDTH) for _ in range(3)))
    grows = own.Amplified.apply
    match kind:
        case "function":
            model[1].between = lambda x: grows(x, 1e7)
        case "cast":
            model[1].between = own.InFloat32.apply
        case "intermediate":
            model[1].between = own.PassesThroughTooMuch.apply
        case "hook":
            model[1].between = amplifying_hook
        case "module":
            model[1].first.register_full_backward_hook(amplifying_module_hook)
        case "parameter":
            model[1].first.weight.register_hook(amplifying)
    return model


def amplifying(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 1e8  # planted: hook, parameter


def amplifying_hook(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(amplifying)
    return x * 1.0


def amplifying_module_hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] * 1e8,)  # planted: module


def line_of(kind: str) -> tuple[str, int]:
    """File and number of the line that is at fault."""
    marks = {
        "function": "return gradient * ctx.factor",
        "cast": "gradient.float() * 1e9",
        "intermediate": "large = gradient * 1e8",
        "module": "# planted: module",
    }
    file = __file__ if kind in ("hook", "module", "parameter") else own.__file__
    mark = marks.get(kind, "# planted: hook")
    texts = Path(file).read_text(encoding="utf-8").splitlines()
    return file, next(
        n for n, text in enumerate(texts, 1) if mark in text and "mark" not in text.split(mark)[0]
    )


@pytest.mark.parametrize("kind", ["function", "cast", "intermediate", "hook", "module", "parameter"])
def test_a_planted_overflow_is_named_with_its_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parameters have a gradient of inf or NaN in a real half module."""
    kept, x = FirstKept(monkeypatch), rows()
    report = ampaudit.scan(planted(kind), x, policy="half", backward=True, loss=smooth, loss_scale=1.0)
    half = gradients(model := planted(kind).half(), model(x.half()))
    broken = {name for name, gradient in half.items() if not gradient.isfinite().all()}
    assert broken
    assert {name for name, pair in kept.pairs.items() if not pair[1].isfinite().all()} == broken
    assert all(pair[0].isfinite().all() for pair in kept.pairs.values())
    found = [f for f in report.findings if f.code == "AMP701"]
    assert len(found) == 1, [(f.code, f.site, f.cause) for f in report.findings]
    assert found[0].severity == "error"
    assert found[0].layer == ("1.first" if kind in ("module", "hook", "parameter") else "1")
    assert found[0].source is not None
    assert (found[0].source.file, found[0].source.line) == line_of(kind)
    assert not [f for f in report.findings if f.code == "AMP705"]


@pytest.mark.parametrize(
    ("factor", "severity", "verdict"), [(1e7, "error", "fail"), (64.0, "warning", "pass")]
)
def test_only_what_a_scale_of_one_cures_is_left_to_the_scaler(
    factor: float, severity: str, verdict: str
) -> None:
    """Without a loss scale, a real half module is not finite with the one and is with the other."""
    model = planted("function")
    model[1].between = lambda x: own.Amplified.apply(x, factor)
    report = ampaudit.scan(model, rows(), policy="half", backward=True, loss=smooth)
    found = {f.severity for f in report.findings if f.code == "AMP701"}
    assert (max(found, key=["warning", "error"].index), report.verdict) == (severity, verdict)
    half = gradients(model.half(), model(rows().half()))
    assert all(gradient.isfinite().all() for gradient in half.values()) is (severity == "warning")


class LargeBefore(nn.Module):
    """The gradient of the head's weight is as large as what the head is given, whatever the scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.first(x) * 8000)
        return made


def test_the_limit_of_the_whole_model_decides_not_that_of_the_op() -> None:
    """A real half module has an infinite gradient without any loss scale, and a finite one under 2^-6."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.float().sum() * 8

    report = ampaudit.scan(LargeBefore(), rows(), policy="half", backward=True, loss=loss)
    found = [f for f in report.findings if f.code == "AMP701"]
    assert report.verdict == "fail"
    assert any("but the whole model needs 2^-" in f.advice for f in found)
    for scale, finite in ((1.0, False), (2.0**-6, True)):
        half = LargeBefore().half()
        (loss(half(rows().half())) * scale).backward()
        assert half.head.weight.grad is not None
        assert bool(half.head.weight.grad.isfinite().all()) is finite


class WithOwner(nn.Module):
    """The function is given the module itself: it cannot be called on other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(own.TakesValue.apply(self.first(x), self))
        return made


def test_what_cannot_be_gone_back_through_is_said() -> None:
    report = ampaudit.scan(WithOwner(), rows(), policy="half", backward=True, loss=smooth, loss_scale=1.0)
    found = [f for f in report.findings if f.code == "AMP706"]
    assert [(f.severity, f.layer) for f in found] == [("warning", "")]
    assert "no gradient is known before TakesValue.backward" in found[0].cause
    assert found[0].source is not None
    assert found[0].source.code == "if gradient.abs().max() > 1e-3:"
    assert report.coverage.uncovered_ops == ("TakesValue.backward",)
    assert report.backward is not None
    # neither are these parameters said to be unused
    assert not report.backward.unused
    assert {p.name for p in report.backward.parameters} == {"head.weight", "head.bias"}


def test_a_backward_that_fails_in_training_is_said_to() -> None:
    """Under autocast a weight is float32 and a gradient float16: their product is an error."""
    report = ampaudit.scan(Reversible(), rows(), policy="torch-cuda", backward=True, loss=smooth)
    cause, advice = next((f.cause, f.advice) for f in report.findings if f.code == "AMP706")
    assert "expected both to have the same dtype" in cause
    assert "custom_bwd" in advice
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = smooth(Reversible()(rows()))
    with pytest.raises(RuntimeError, match="dtype"):
        loss.backward()


def bad_hook(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if float(gradient.sum()) > 0 else gradient * 2


def test_a_hook_that_cannot_be_followed_is_left_out_and_said_to_be() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(bad_hook)
        return x.tanh()

    report = ampaudit.scan(Net(between), rows(), policy="half", backward=True, loss=smooth, loss_scale=1.0)
    found = next(f for f in report.findings if f.code == "AMP706")
    assert found.severity == "warning"
    assert "as if there were no bad_hook" in found.cause
    assert report.backward is not None
    assert len(report.backward.parameters) == 4


def on_a_node(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda inputs, outputs: None)
    return y


def packed(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return x.sin()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_hook_inside_a_checkpoint_is_noted(reentrant: bool) -> None:
    """Autograd registers it on the block's input a second time: the gradient is nine times as large."""

    def block(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: gradient * 3)
        return x.tanh() * 2

    model = Net(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    report = ampaudit.scan(model, rows(), policy="half", backward=True, loss=smooth, loss_scale=1.0)
    assert report.backward is not None
    assert ["checkpoint" in note for note in report.backward.notes] == [True]
    alone = gradients(model, model(rows()))["first.bias"]
    model.between = lambda x: x.tanh() * 2
    assert apart(alone, gradients(model, model(rows()))["first.bias"] * 9) < 1e-6


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_what_is_not_followed_is_noted() -> None:
    model = Net(lambda x: packed(on_a_node(x)))
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model.head.register_backward_hook(lambda module, inputs, outputs: None)
    report = ampaudit.scan(model, rows(), policy="torch-cuda", backward=True, loss=smooth)
    assert report.backward is not None
    notes = " ".join(report.backward.notes)
    hooks = ("grad_fn.register_hook", "saved_tensors_hooks", "once a parameter", "register_backward_hook")
    for word in hooks:
        assert word in notes, word


def forward_sites(report: Any) -> list[tuple[Any, ...]]:
    return [(s.site, s.op, s.layer, s.precision, s.source) for s in report.sites if s.layer != "loss"]


@pytest.mark.parametrize("name", ["saved sigmoid", "in place on a view", "nested", "linear", "module hook"])
@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_the_forward_audit_does_not_see_ways_back(name: str, policy: str) -> None:
    alone = ampaudit.scan(CASES[name](), rows(), policy=policy)
    both = ampaudit.scan(CASES[name](), rows(), policy=policy, backward=True, loss=smooth)
    hidden = {"view_as"}  # what hooks of a module put around it where there are gradients
    assert [s for s in forward_sites(both) if s[1].split(".")[1] not in hidden] == forward_sites(alone)


def test_hooks_run_on_a_copy_and_torch_is_as_it_was() -> None:
    seen: list[torch.Tensor] = []
    model = parameter_hook()
    model.head.weight.register_hook(seen.append)
    tensor: Any = torch.Tensor
    names = ("register_hook", "retain_grad", "data", "grad_fn", "register_post_accumulate_grad_hook")
    context: Any = torch.autograd.function.BackwardCFunction
    before = [getattr(tensor, name) for name in names], context.saved_tensors, context.apply
    own_apply = torch.autograd.Function.apply
    report = ampaudit.scan(model, rows(), policy="half", backward=True, loss=smooth, loss_scale=1.0)
    assert not [f for f in report.findings if f.code == "AMP706"]
    assert not seen
    assert all(parameter.grad is None for parameter in model.parameters())
    assert before == ([getattr(tensor, name) for name in names], context.saved_tensors, context.apply)
    assert torch.autograd.Function.apply == own_apply
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    smooth(model(rows())).backward()
    assert len(seen) == 1


def test_a_forward_pass_without_gradients_may_ask_for_hooks() -> None:
    """Such code runs in training; a scan that goes forward only has no use for it."""
    report = ampaudit.scan(CASES["hook"](), rows(), policy="half")
    assert not [f for f in report.findings if f.severity == "error"]


def test_a_backward_that_writes_leaves_the_model_alone() -> None:
    model = Net(own.WritesOnTheWay.apply, nn.Parameter(torch.ones(WIDTH)))
    for _ in range(2):
        report = ampaudit.scan(model, rows(), policy="half", backward=True, loss=smooth, loss_scale=1.0)
        assert report.backward is not None
        assert torch.equal(model.extra[0], torch.ones(WIDTH))
    half = gradients(made := model.half(), made(rows().half()))
    peaks = {p.name: p.gradient.peak for p in report.backward.parameters}
    assert peaks == pytest.approx({name: float(g.abs().max()) for name, g in half.items()}, rel=1e-3)


def test_what_lies_behind_an_overflow_is_no_fault_of_its_own() -> None:
    """The gradient stays beyond the format through two more functions; one finding names the first."""

    def between(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = own.Amplified.apply(own.Swish.apply(own.Amplified.apply(x, 10.0)), 1e9)
        return made

    report = ampaudit.scan(Net(between), rows(), policy="half", backward=True, loss=smooth, loss_scale=1.0)
    assert [f.site for f in report.findings if f.code == "AMP701"] == ["(top)/clone#2"]


def test_a_value_that_is_written_has_one_gradient() -> None:
    """Marks and copies do not count its elements twice."""
    report = ampaudit.scan(
        CASES["in place on a view"](), rows(), policy="half", backward=True, loss=smooth, loss_scale=1.0
    )
    counts = {s.site: s.gradient.elements for s in report.sites if s.gradient is not None}
    assert counts["(top)/add_"] == 8 * 8
    assert counts["(top)/mul"] == 8 * WIDTH


def test_each_batch_goes_its_own_way_back() -> None:
    """Shapes may change between them; the report has the largest gradient of all."""
    batches = [(rows(4),), (rows(8) * 2,), (rows(4) * 3,)]
    model = CASES["saved sigmoid"]()
    report = ampaudit.scan(model, batches=batches, policy="half", backward=True, loss=smooth, loss_scale=1.0)
    peaks: dict[str, float] = {}
    for batch in batches:
        for name, gradient in gradients(model.half(), model(batch[0].half())).items():
            peaks[name] = max(peaks.get(name, 0.0), float(gradient.abs().max()))
    assert report.backward is not None
    assert len(report.backward.losses) == 3
    assert {p.name: p.gradient.peak for p in report.backward.parameters} == pytest.approx(peaks, rel=1e-3)
