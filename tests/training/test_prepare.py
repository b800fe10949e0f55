"""Prepared models against FP32, real autocast, and themselves after a restart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.errors import PolicyError, TraceFailed, UsageError
from benchmarks.casts import Casts
from tests.support import zoo
from tests.support.training.cases import HEALTHY, WIDTH, Case, Stack, classes, rows

POLICIES = ["torch-cuda", "apex-o1", "apex-o2", "half", "ampaudit", "modelopt"]


def trained(
    case: Case, steps: int = 12, prepared: ampaudit.PreparedTrace | None = None, **options: Any
) -> tuple[list[float], ampaudit.PreparedTrace]:
    """Losses of some steps; the model is the case's own."""
    if prepared is None:
        optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2, eps=1e-4)
        prepared = ampaudit.prepare(case.model.train(), optimizer, **options)
    losses = []
    for _ in range(steps):
        prepared.optimizer.zero_grad()
        loss = case.loss(prepared.model(case.inputs))
        prepared.scaler.scale(loss).backward()
        prepared.scaler.step(prepared.optimizer)
        prepared.scaler.update()
        losses.append(loss.item())
    return losses, prepared


def plain(case: Case, steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW(case.model.train().parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = case.loss(case.model(case.inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fresh(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_o0_is_fp32(make: Callable[[], Case]) -> None:
    torch.manual_seed(3)
    expected = plain(fresh(make))
    torch.manual_seed(3)
    losses, prepared = trained(fresh(make), policy="apex-o0")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert not prepared.scaler.is_enabled() or prepared.scaler.get_scale() == 1.0


@pytest.mark.parametrize("make", [HEALTHY[0], HEALTHY[2], HEALTHY[4], HEALTHY[7]], ids=lambda m: m.__name__)
@pytest.mark.parametrize("policy", POLICIES)
def test_float16_with_masters_follows_fp32(make: Callable[[], Case], policy: str) -> None:
    expected = plain(fresh(make))
    losses, prepared = trained(fresh(make), policy=policy, emulate=True)
    assert losses == pytest.approx(expected, rel=0.05, abs=5e-3)
    assert losses != expected
    assert all(p.dtype is torch.float32 for p in prepared.model.parameters())


@pytest.mark.parametrize("policy", ["torch-cpu", "apex-o2", "apex-o3"])
def test_native_bfloat16_follows_fp32(policy: str) -> None:
    expected = plain(fresh(HEALTHY[2]))
    losses, prepared = trained(fresh(HEALTHY[2]), policy=policy, dtype="bfloat16")
    assert losses == pytest.approx(expected, rel=0.1, abs=0.02)
    pure = policy == "apex-o3"
    assert {p.dtype for p in prepared.model.parameters()} == {torch.bfloat16 if pure else torch.float32}


def test_emulated_is_native() -> None:
    """The same graph in real 16-bit kernels, which a CPU has for these ops."""
    for policy in ("torch-cuda", "apex-o2"):
        native, _ = trained(fresh(HEALTHY[0]), policy=policy)
        emulated, _ = trained(fresh(HEALTHY[0]), policy=policy, emulate=True)
        assert native == pytest.approx(emulated, rel=2e-3)


def test_o2_computes_with_16_bit_weights_made_from_masters() -> None:
    case = fresh(HEALTHY[2])
    _, prepared = trained(case, steps=1, policy="apex-o2")
    model: Any = prepared.model
    stored = {p.name: p.dtype for p in model.traced(case.inputs).placeholders if p.slot == "parameter"}
    assert stored["0.weight"] is torch.float16
    assert stored["1.weight"] is torch.float32  # a batch norm
    assert model.get_parameter("0.weight").dtype is torch.float32


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "resnet", "vit"])
def test_a_step_casts_no_more_often_than_autocast(name: str) -> None:
    found: zoo.ZooModel = getattr(zoo, name)()
    model = found.model.eval()
    if hasattr(model, "config"):
        model.config.use_cache = False

    def step(call: Callable[[], Any]) -> int:
        model.zero_grad()
        with Casts() as casts:
            output = call()
            first = next(v for v in output.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
            first.float().square().mean().backward()
        return casts.count

    def autocast() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**found.kwargs)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared = ampaudit.prepare(model, optimizer, policy="torch-cpu", dtype="bfloat16")
    prepared.model.eval()
    prepared.model(**found.kwargs)  # traced apart
    ours = step(lambda: prepared.model(**found.kwargs))
    theirs = step(autocast)
    with torch.no_grad():
        low = sum(v.dtype is torch.bfloat16 for v in autocast().values() if isinstance(v, torch.Tensor))
    assert 0 < ours <= theirs + low  # prepared models return float32


class Forked(nn.Module):
    """Two layers read an activation: their gradients of it fit in float16, and the sum of both does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.left, self.right = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        for layer in (self.left, self.right):
            nn.init.eye_(layer.weight).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.left(x) + self.right(x)


def test_gradients_of_an_activation_add_up_in_its_own_dtype() -> None:
    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return output.float().sum() * 40_000

    torch.manual_seed(0)
    model, x = Forked().train(), torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model(x))
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(bool(gradient.isfinite().all()) for gradient in expected.values())
    report = ampaudit.scan(model, x, policy="torch-cpu", backward=True, loss=loss_of, loss_scale=1.0)
    assert "AMP701" not in {finding.code for finding in report.findings}
    model.zero_grad(set_to_none=True)
    prepared = ampaudit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="torch-cpu")
    loss_of(prepared.model(x)).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=0, atol=0)


def test_outputs_keep_their_structure_and_are_float32() -> None:
    found = zoo.bert()
    optimizer = torch.optim.SGD(found.model.parameters(), lr=0.0)
    prepared = ampaudit.prepare(found.model.eval(), optimizer, emulate=False, dtype="bfloat16")
    ours, theirs = prepared.model(**found.kwargs), found.model(**found.kwargs)
    assert type(ours) is type(theirs)
    assert ours.last_hidden_state.dtype is torch.float32
    assert torch.allclose(ours.last_hidden_state, theirs.last_hidden_state, atol=0.1)


@pytest.mark.parametrize("policy", ["torch-cuda", "apex-o2", "apex-o3", "apex-o0"])
@pytest.mark.parametrize("make", [HEALTHY[2], HEALTHY[3]], ids=lambda make: make.__name__)
def test_a_resumed_run_takes_the_same_next_steps_bit_for_bit(make: Callable[[], Case], policy: str) -> None:
    torch.manual_seed(1)
    whole = fresh(make)
    _, prepared = trained(whole, 4, policy=policy, emulate=True)
    saved, random = copy.deepcopy(prepared.state_dict()), torch.get_rng_state()
    losses, _ = trained(whole, 4, prepared)
    again = fresh(make)
    _, restored = trained(again, 0, policy=policy, emulate=True)
    restored.load_state_dict(saved)
    torch.set_rng_state(random)
    repeated, _ = trained(again, 4, restored)
    assert repeated == losses
    for name, value in prepared.model.state_dict().items():
        assert torch.equal(value, restored.model.state_dict()[name]), name


def test_a_state_dict_is_the_models_own() -> None:
    case = fresh(HEALTHY[2])
    names = list(case.model.state_dict())
    _, prepared = trained(case, 2, policy="apex-o2", emulate=True)
    state = prepared.state_dict()["model"]
    assert list(state) == names
    fresh(HEALTHY[2]).model.load_state_dict(state)
    with pytest.raises(UsageError, match="no optimizer, scaler"):
        prepared.load_state_dict({"model": state})


def test_evaluation_in_fp32_and_in_16_bits() -> None:
    case = fresh(HEALTHY[2])
    _, prepared = trained(case, 3, emulate=True)
    prepared.model.eval()
    assert not case.model.training
    with torch.no_grad():
        exact = case.model(case.inputs)
        lower = prepared.model(case.inputs)
        with prepared.float32() as plain_model:
            assert torch.equal(plain_model(case.inputs), exact)
        assert not torch.equal(lower, exact)
        assert torch.allclose(lower, exact, atol=0.05)
    prepared.model.train()
    assert case.model.training


def test_batch_norm_statistics_move_as_in_fp32() -> None:
    for policy in ("torch-cuda", "half"):
        exact, lower = fresh(HEALTHY[2]), fresh(HEALTHY[2])
        plain(exact, 3)
        trained(lower, 3, policy=policy, emulate=True)
        for name in ("1.running_mean", "1.running_var", "5.running_mean"):
            ours, theirs = lower.model.get_buffer(name), exact.model.get_buffer(name)
            assert torch.allclose(ours, theirs, rtol=0.02, atol=0.01), (policy, name)
        assert lower.model.get_buffer("1.num_batches_tracked").item() == 3


def test_other_shapes_are_traced_anew() -> None:
    case = fresh(HEALTHY[0])
    _, prepared = trained(case, 1, emulate=True)
    assert prepared.model(rows(3)).shape == (3, 4)
    model: Any = prepared.model
    assert len(model._ampaudit_compiled) == 2


class Stopped(Stack):
    """A layer is used with gradients switched off, and with them on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.second(self.first(x))
        return self.head(torch.relu(self.first(x)) - target)


@pytest.mark.parametrize("emulate", [False, True])
def test_gradients_stop_where_the_models_code_says(emulate: bool) -> None:
    model, x = Stopped(), rows()
    classes(model(x)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    prepared = ampaudit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), emulate=emulate)
    classes(prepared.model(x)).backward()
    for name, parameter in model.named_parameters():
        exact = expected[name]
        if exact is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, exact, rtol=0.02, atol=1e-3), name


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class StraightThrough(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Rounding.apply(self.first(x) * 4))


def test_code_with_its_own_way_back_is_refused_or_run_as_it_is() -> None:
    model = StraightThrough()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"own backward .Rounding."):
        ampaudit.prepare(model, optimizer).model(rows())
    prepared = ampaudit.prepare(model, optimizer, policy="torch-cpu", dtype="bfloat16", how="autocast")
    classes(prepared.model(rows())).backward()
    assert model.first.weight.grad is not None
    assert model.first.weight.grad.abs().max() > 0
    with pytest.raises(UsageError, match="which is policy 'torch-cpu', not 'apex-o1'"):
        ampaudit.prepare(model, optimizer, policy="apex-o1", how="autocast")


class Deciding(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize("policy", ["torch-cpu", "ampaudit"])
def test_code_that_depends_on_values_is_refused_with_a_way_to_train_it(policy: str) -> None:
    model, x = Deciding(), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TraceFailed, match="depends on the values") as caught:
        ampaudit.prepare(model, optimizer, policy=policy).model(x)
    assert "prepare(..., how='autocast')" in caught.value.hint
    prepared = ampaudit.prepare(model, optimizer, policy="torch-cpu", dtype="bfloat16", how="autocast")
    loss = classes(prepared.model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    assert torch.equal(loss, classes(output.float()))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "options", [{"how": "jit"}, {"loss_scale": -1.0}, {"loss_scale": 0}, {"loss_scale": float("nan")}]
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ampaudit.prepare(nn.Linear(4, 4), None, **options)


@pytest.mark.parametrize("nested", [False, True])
def test_a_wrapped_model_is_refused_with_the_line_to_write(nested: bool) -> None:
    """Wrappers are known by the names of their classes: making real ones needs a process group."""

    def wrapped(kind: str, model: nn.Module) -> nn.Module:
        inner = nn.Module.__new__(type(kind, (nn.Module,), {}))
        nn.Module.__init__(inner)
        inner.module = model
        return nn.Sequential(inner) if nested else inner

    place = r" \(its submodule 0\)\n" if nested else r"\n"
    for kind, line in {
        "DistributedDataParallel": "prepare(model.module, optimizer); model = DistributedDataParallel(prep",
        "DataParallel": "prepare(model.module, optimizer); model = DistributedDataParallel(prep",
        "FullyShardedDataParallel": "prepare(model, group=True); fully_shard(prepared.model)",
        "FSDPModule": "prepare(model, group=True); fully_shard(prepared.model)",
    }.items():
        with pytest.raises(UsageError, match=f"wrapped in {kind} already{place}") as caught:
            ampaudit.prepare(wrapped(kind, Stack()))
        assert line in caught.value.hint
    twice = ampaudit.prepare(Stack(), emulate=True).model
    with pytest.raises(UsageError, match=f"prepared already{place}"):
        ampaudit.prepare(nn.Sequential(twice) if nested else twice)
    with pytest.raises(UsageError, match="the model is of type Prepared"):
        ampaudit.prepare(ampaudit.prepare(Stack()))  # type: ignore[arg-type]


def test_a_loop_without_masters_steps() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = ampaudit.prepare(model, optimizer, policy="apex-o3")
    before = [p.detach().clone() for p in prepared.model.parameters()]
    loss = prepared.model(torch.randn(4, WIDTH)).float().square().mean()
    prepared.scaler.scale(loss).backward()
    prepared.scaler.unscale_(optimizer)
    prepared.scaler.step(optimizer)
    prepared.scaler.update()
    after = list(prepared.model.parameters())
    assert {p.dtype for p in after} == {torch.float16}
    assert any(not torch.equal(b, a) for b, a in zip(before, after, strict=True))


def test_mistakes_are_one_line() -> None:
    model, other = Stack(), Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="holds no parameter of the model"):
        ampaudit.prepare(other, optimizer)
    with pytest.raises(PolicyError, match="unknown policy"):
        ampaudit.prepare(model, optimizer, policy="apex-o9")
    half = Stack().half()
    with pytest.raises(UsageError, match="8 parameters are in 16 bits already"):
        ampaudit.prepare(half, torch.optim.SGD(half.parameters(), lr=0.1))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> Any:
            class Holder:
                def __init__(self, value: torch.Tensor) -> None:
                    self.value = value

            return Holder(self.inner(x))

    odd = Odd()
    with pytest.raises(UsageError, match="an object that torch cannot take apart"):
        ampaudit.prepare(odd, torch.optim.SGD(odd.parameters(), lr=0.1)).model(rows())


@pytest.mark.parametrize("emulate", [True, False])
def test_without_masters_the_optimizer_stays(emulate: bool) -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = ampaudit.prepare(model, optimizer, policy="apex-o3", emulate=emulate)
    assert prepared.stepping(optimizer).optimizer is optimizer
    with pytest.raises(UsageError, match="another optimizer cannot take over"):
        prepared.stepping(torch.optim.SGD(prepared.model.parameters(), lr=0.1))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["torch-cuda", "apex-o1", "apex-o2"])
@pytest.mark.parametrize("make", HEALTHY[:4], ids=lambda make: make.__name__)
def test_float16_on_a_gpu_follows_fp32(make: Callable[[], Case], policy: str) -> None:
    def on_gpu() -> Case:
        case = fresh(make)
        for module in case.model.modules():  # kernels of float16 and of float32 draw other numbers
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        return Case(case.model.cuda(), case.inputs.cuda(), lambda y: case.loss(y.cpu()))

    losses, prepared = trained(on_gpu(), policy=policy)
    assert losses == pytest.approx(plain(on_gpu()), rel=0.05, abs=5e-3)
    assert prepared.scaler.get_scale() > 1.0


@pytest.mark.gpu
def test_o1_is_cuda_autocast() -> None:
    case = fresh(HEALTHY[2])
    model, inputs = case.model.cuda(), case.inputs.cuda()
    prepared = ampaudit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.autocast("cuda", dtype=torch.float16):
        expected = model(inputs)
    torch.testing.assert_close(prepared.model(inputs), expected.float(), rtol=2e-3, atol=2e-3)
