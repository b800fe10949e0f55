"""Gradients of the mixed graph against autograd, real 16-bit modules, and brute force over scales."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ampaudit
from ampaudit.core.errors import InputError, ReferenceBroken, RunFailed, UsageError
from ampaudit.core.formats import BFLOAT16, FLOAT16
from ampaudit.instruments.backward.audit import EXPONENT_OFFSET, counts_on_cpu, exponent_counts
from ampaudit.instruments.backward.record import GradientStats, NamedGradient, advice_on_scale
from ampaudit.render.render import as_file
from tests.support import zoo
from tests.support.backward import Kept, audit
from tests.support.training.cases import HEALTHY, PLANTED, WIDTH, Case, Stack, classes, rows


def weighted(output: Any) -> torch.Tensor:
    """A loss whose gradient is large everywhere."""
    values = output.values() if hasattr(output, "values") else [output]
    first = next(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
    weights = torch.sin(torch.arange(first.numel()).float()).view(first.shape)
    return (first.float() * weights).mean()


def architectures() -> list[str]:
    return sorted(
        name for name, made in vars(zoo).items()
        if callable(made) and getattr(made, "__annotations__", {}).get("return") == "ZooModel"
    )  # fmt: skip


@pytest.mark.parametrize("name", architectures())
def test_the_reference_is_autograds_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch)
    found: zoo.ZooModel = getattr(zoo, name)()
    model = found.model.eval()
    record = audit(model, kwargs=found.kwargs, loss=weighted).record.parts["backward"]
    assert record is not None
    model.zero_grad()
    if hasattr(model, "config"):
        model.config.use_cache = False
    weighted(model(**found.kwargs)).backward()
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    compared = 0
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None and parameter_name in kept.pairs:
            ours = kept.pairs[parameter_name][0] / 65536.0
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-3, atol=1e-5 * largest)
            compared += 1
    assert compared == len(record.parameters) == sum(p.grad is not None for p in model.parameters())


def test_dropout_draws_the_same_numbers_on_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 4)
    )
    x = rows()
    audit(model.train(), (x,), loss=classes)
    torch.manual_seed(0)  # of batch 0
    classes(model(x)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(kept.pairs[name][0] / 65536.0, parameter.grad)


def test_emulated_gradients_are_those_of_a_module_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    x = rows()
    audit(model, (x,), loss=lambda y: y.float().square().mean(), policy="half", scale=256.0)
    (model.half()(x.half()).float().square().mean() * 256.0).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (kept.pairs[name][1] - parameter.grad.float()).norm() / parameter.grad.float().norm()
        assert error < 1e-3, name


def test_emulated_gradients_are_those_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on the CPU is the autocast that can be run here; its gradients lose 8 bits, ours as many."""
    kept = Kept(monkeypatch)
    model = Stack()
    x = rows(64)
    audit(model, (x,), loss=classes, policy="torch-cpu", scale=1.0, form=BFLOAT16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = classes(model(x))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        reference, ours = kept.pairs[name]
        norm = reference.norm()
        real = (parameter.grad - reference).norm() / norm
        assert real < 0.1
        assert (ours - parameter.grad).norm() / norm < max(0.5 * real.item(), 1e-3), name


class InPlace(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        match self.kind:
            case "relu":
                y.relu_()
            case "slice":
                z = y * 2
                z[:, :4] *= y[:, 4:8]
                y = z
            case "view":
                z = y.clone()
                v = z.view(-1, 4)
                v[0].mul_(3.0)
                y = z + v.reshape(z.shape)
            case "halves":
                z = y * 1.0
                a, b = z[:, :8], z[:, 8:]
                a.add_(b)
                y = torch.cat([z, b], -1)
            case "transposed":
                z = y * 0.5
                z.t()[1].add_(y[0].sum())
                y = z * z.t()[1].mean()
            case "select twice":
                z = y * 1.0
                z[0] = z[1] * 2
                z[1] = z[0] + 1
                y = z
            case "reshaped in place":
                z = y * 1.0
                v = z[0]
                w = v[:4]
                v.unsqueeze_(0).transpose_(0, 1).add_(1.0)
                w.mul_(2.0)
                v.squeeze_().mul_(y[1])
                y = z * 2
            case "vmap":
                y = torch.vmap(self.inner)(x * 1.0)
            case "returned":
                z = y * 1.0
                v = z[:, 0]
                z.mul_(2.0)
                v.mul_(3.0)
                y = z + 0.5
            case "no grad":
                with torch.no_grad():
                    z = self.inner(x) * 5
                y = y * z
            case "detach":
                y = y * y.detach().exp()
        return y


@pytest.mark.parametrize(
    "kind",
    "relu|slice|view|halves|transposed|select twice|reshaped in place|vmap|returned|no grad|detach".split(
        "|"
    ),
)
@pytest.mark.parametrize("policy", ["torch-cuda", "half", "onnx"])
def test_writing_in_place_and_stopped_gradients(
    kind: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(monkeypatch)
    model, x = InPlace(kind), rows()
    weights = torch.randn(8, 2 * WIDTH)
    audit(model, (x,), loss=lambda y: (y.float() * weights[:, : y.shape[1]]).sum(), policy=policy, scale=4.0)
    y = model(x)
    (y * weights[:, : y.shape[1]]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        reference, lower = kept.pairs[name]
        torch.testing.assert_close(reference / 4.0, parameter.grad, rtol=1e-4, atol=1e-4)
        assert (lower.float() - reference).norm() < 0.02 * reference.norm()


@given(st.lists(st.floats(width=32, allow_subnormal=True), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_exponents_are_counted_exactly(values: list[float]) -> None:
    counts = exponent_counts(torch.tensor(values, dtype=torch.float32)).tolist()
    expected: Counter[int] = Counter()
    for value in map(abs, values):
        if not math.isfinite(value):
            expected[255] += 1
        elif value != 0:
            mantissa, exponent = math.frexp(value)
            place = exponent - 2 if mantissa == 0.5 else exponent - 1
            expected[max(place + EXPONENT_OFFSET, 0)] += 1
    assert Counter({place: n for place, n in enumerate(counts) if n}) == expected


def seen_of(values: torch.Tensor) -> GradientStats:
    counts = exponent_counts(values).tolist()
    exponents = Counter({place - EXPONENT_OFFSET: n for place, n in enumerate(counts) if n})
    return GradientStats(
        True, nonzero=int((values != 0).sum()), exponents=exponents, peak=values.abs().max().item()
    )


EDGES = [2.0**-25, 2.0**-30, 65520.0 / 64]
MAGNITUDES = st.floats(2.0**-40, 1024.0, width=32) | st.sampled_from(EDGES)


@given(
    st.lists(
        st.lists(MAGNITUDES, min_size=1, max_size=20),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0.0, 0.05, 0.5]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_advice_is_what_rounding_at_every_scale_shows(layers: list[list[float]], share: float) -> None:
    tensors = [torch.tensor(values, dtype=torch.float32) for values in layers]
    named = [NamedGradient(f"g{i}", f"layer{i}", seen_of(t)) for i, t in enumerate(tensors)]
    advice = advice_on_scale(named, FLOAT16, 1.0, share)
    assert advice is not None
    suits = []
    for row in advice.rows:
        rounded = [(t.double() * 2.0**row.exponent).half() for t in tensors]
        flushed = [int((r == 0).sum()) for r in rounded]
        assert row.flushed == pytest.approx(sum(flushed) / sum(t.numel() for t in tensors))
        assert row.overflowing == sum(bool(r.isinf().any()) for r in rounded)
        fits = all(f <= share * t.numel() for f, t in zip(flushed, tensors, strict=True))
        suits.append(row.overflowing == 0 and fits)
    assert suits == [advice.low <= row.exponent <= advice.high for row in advice.rows]


@pytest.mark.parametrize("make", [HEALTHY[0], HEALTHY[3], PLANTED[0], PLANTED[5]], ids=lambda m: m.__name__)
def test_the_advice_of_one_run_holds_in_a_run_at_every_scale(make: Callable[[], Case]) -> None:
    case = make()
    first = ampaudit.scan(case.model, case.inputs, policy="torch-cuda", backward=True, loss=case.loss)
    assert first.backward is not None
    advice = first.backward.advice
    assert advice is not None
    for row in advice.rows[::2]:
        report = ampaudit.scan(
            case.model, case.inputs, policy="torch-cuda", backward=True, loss=case.loss,
            loss_scale=2.0**row.exponent,
        )  # fmt: skip
        overflows = any(f.code == "AMP701" for f in report.findings)
        assert overflows == (row.overflowing > 0), row
        gradients = [s.gradient for s in report.sites if s.gradient is not None]
        lowered = [g for g in gradients if g.precision == "16 bits"]
        nonzero = sum(sum(g.exponents.values()) for g in lowered)
        flushed = sum(g.flushed * sum(g.exponents.values()) for g in lowered)
        # what is flushed on the way takes a little more with it
        assert row.flushed - 0.005 <= flushed / nonzero <= row.flushed + 0.02


@pytest.mark.parametrize("make", PLANTED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("policy", ["torch-cuda", "ampaudit"])
def test_a_planted_gradient_fault_is_found_at_its_layer(make: Callable[[], Case], policy: str) -> None:
    case = make()
    report = ampaudit.scan(case.model.train(), case.inputs, policy=policy, backward=True, loss=case.loss)
    found = [f for f in report.findings if f.code == case.code]
    assert len(found) == 1, [(f.code, f.site) for f in report.findings]
    assert (found[0].layer or "(top)").startswith(case.layer)
    assert found[0].severity != "note"
    beside = {"AMP701", "AMP702"} - {case.code} if case.code != "AMP703" else {"AMP702"}
    assert not [f for f in report.findings if f.code in beside]


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
@pytest.mark.parametrize("policy", ["torch-cuda", "ampaudit", "apex-o1"])
def test_a_healthy_model_raises_no_alarm(make: Callable[[], Case], policy: str) -> None:
    case = make()
    report = ampaudit.scan(case.model.train(), case.inputs, policy=policy, backward=True, loss=case.loss)
    assert not [(f.code, f.site) for f in report.findings if f.severity != "note"]
    assert report.backward is not None
    assert report.backward.suggested is not None


def test_no_loss_scale_is_suggested_where_bfloat16_needs_none() -> None:
    case = HEALTHY[0]()
    for dtype, suggested in (("bfloat16", False), ("float16", True)):
        report = ampaudit.scan(
            case.model.train(), case.inputs, policy="torch-cuda", dtype=dtype, backward=True, loss=case.loss
        )
        assert report.backward is not None
        assert (report.backward.suggested is not None) == suggested
        assert ("flushed to zero; use " in " ".join(as_file(report, "text").split())) == suggested


def test_the_evidence_of_a_gradient_has_no_numbers_that_were_not_measured() -> None:
    case = next(case for make in PLANTED if (case := make()).code == "AMP702")
    report = ampaudit.scan(case.model.train(), case.inputs, policy="ampaudit", backward=True, loss=case.loss)
    seen = next(f.evidence for f in report.findings if f.code == "AMP702")
    assert seen.flushed is not None
    assert (seen.subnormal, seen.max_error, seen.local_sqnr_db) == (None, None, None)


def test_two_faults_are_two_findings() -> None:
    """The second explodes behind the first, which is in range again in between."""

    class Two(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            x = x.detach() + (x - x.detach()) * 1e12
            x = torch.relu(self.second(x))
            x = x.detach() + (x - x.detach()) * 1e-12
            return self.head(self.third(x.detach() + (x - x.detach()) * 1e8))

    report = ampaudit.scan(Two(), rows(), policy="torch-cuda", backward=True, loss=classes)
    sites = [f.site for f in report.findings if f.code == "AMP701"]
    assert sites == ["(top)/mul", "(top)/mul#3"]


def test_a_fault_of_the_forward_pass_does_not_hide_the_gradients() -> None:
    class Overflowing(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 + 0.0 * self.first(x * 1e5).sum())

    report = ampaudit.scan(Overflowing(), rows(), policy="half", backward=True, loss=classes, loss_scale=64.0)
    assert [f.site for f in report.findings if f.severity == "error" and f.phase == "forward"]
    assert report.backward is not None
    assert len(report.backward.parameters) == 8
    assert all(p.gradient.nan == 0 for p in report.backward.parameters)


def test_the_sum_of_two_gradients_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 3/4 of an ulp is 1 + an ulp: times 3 that shows, and a real half module says the same."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.inner(x)
            return y * 1.0, y * (2.0**-11 + 2.0**-12)

    def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return output[0].float().sum() + output[1].float().sum()

    kept, model, x = Kept(monkeypatch), Twice(), torch.tensor([[3.0]])
    audit(model, (x,), loss=loss, policy="half", scale=1.0)
    loss(model.half()(x.half())).backward()
    assert model.inner.weight.grad is not None
    assert kept.pairs["inner.weight"][1].item() == model.inner.weight.grad.item() == 3.00390625


def test_a_backward_uses_the_rounded_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The derivative of exp is its result, which a 16-bit kernel keeps in 16 bits."""

    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.powers = nn.Parameter(torch.linspace(-3, 3, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.powers.exp() * x

    kept, model, x = Kept(monkeypatch), Exponential(), torch.full((64,), 3.0)
    audit(model, (x,), loss=lambda y: y.float().sum(), policy="half", scale=1.0)
    model.half()(x.half()).float().sum().backward()
    assert model.powers.grad is not None
    assert torch.equal(kept.pairs["powers"][1], model.powers.grad.float())


def test_a_sum_of_repaired_gradients_is_no_fault_of_its_own() -> None:
    class Both(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            left = x.detach() + (x - x.detach()) * 1e12
            right = x.detach() + (x - x.detach()) * 2e12
            return self.head(self.third(left + right))

    report = ampaudit.scan(Both(), rows(), policy="torch-cuda", backward=True, loss=classes)
    assert {f.site for f in report.findings if f.code == "AMP701"} == {"(top)/mul", "(top)/mul#2"}


class Normed(nn.Module):
    """The gradient of ``h`` is the difference of two that overflow where ``h`` is near zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        made: torch.Tensor = self.last(h / (h.abs() * 1e-4 + 1e-6).sqrt())
        return made


def test_repaired_gradients_of_opposite_sign_do_not_vanish() -> None:
    torch.manual_seed(0)
    model = Normed().train()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    x[0] = 0
    report = ampaudit.scan(model, x, backward=True, loss=lambda out: (out**2).mean())
    assert "AMP701" in {f.code for f in report.findings}
    assert "AMP702" not in {f.code for f in report.findings}


def test_a_policy_that_gives_float32_outputs_gives_them_to_the_loss() -> None:
    """Apex O2 casts what the model returns, and the loss outside is computed in FP32."""
    case = HEALTHY[0]()
    for policy, precision in (("apex-o2", "float32"), ("half", "float16")):
        report = ampaudit.scan(case.model, case.inputs, policy=policy, backward=True, loss=case.loss)
        found = {site.site: site.precision for site in report.sites if site.layer == "loss"}
        assert found["loss/log_softmax"] == precision


def losses_with(**options: Any) -> Any:
    return ampaudit.scan(Stack(), rows(), policy="torch-cuda", backward=True, **options)


def test_what_cannot_be_differentiated_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="there is no loss"):
        losses_with()
    with pytest.raises(InputError, match=r"loss\(\) cannot be called: missing .* 'scale'"):
        losses_with(loss=lambda y, batch, scale: y.mean())
    with pytest.raises(InputError, match="returned 8x4 of float32"):
        losses_with(loss=lambda y: y.float())
    with pytest.raises(InputError, match="returned float"):
        losses_with(loss=lambda y: 1.0)
    with pytest.raises(InputError, match=r"returned float\n.* return a tensor .* not its \.item"):
        losses_with(loss=lambda y: y.mean().item())
    with pytest.raises(ReferenceBroken, match="FP32 model itself gives NaN"):
        losses_with(loss=lambda y: (y - 1e9).sqrt().mean())
    with pytest.raises(ReferenceBroken, match="FP32 gradient itself"):
        losses_with(loss=lambda y: (y.float() * 0.0).sqrt().mean())
    with pytest.raises(RunFailed, match="no parameter gets a gradient"):
        losses_with(loss=lambda y: y.detach().mean())
    with pytest.raises(UsageError, match="--ranges cannot be combined with --backward"):
        losses_with(loss=classes, ranges=True)
    with pytest.raises(InputError, match="no parameter of the model requires"):
        ampaudit.scan(Stack().requires_grad_(False), rows(), backward=True, loss=classes)


def test_advice_that_cannot_be_tried_is_not_announced() -> None:
    """Without ``--backward``, with which ``--advise`` cannot be combined, there is no loss."""
    report = ampaudit.scan(Stack(), rows(), policy="half", backward=True, loss=lambda y: (y * 1e6).sum())
    assert ("AMP101", "error", "loss") in {(f.code, f.severity, f.layer) for f in report.findings}
    assert "--advise tries" not in str(report)


def test_frozen_and_unused_parameters_are_named() -> None:
    model = Stack(nn.Linear(WIDTH, WIDTH))
    model.first.requires_grad_(False)
    model.spare = nn.Linear(2, 2)
    report = ampaudit.scan(model, rows(), policy="torch-cuda", backward=True, loss=classes)
    assert report.backward is not None
    assert report.backward.frozen == ("first.bias", "first.weight")
    assert report.backward.unused == ("spare.bias", "spare.weight")
    assert [f.layer for f in report.findings if f.code == "AMP705"] == ["spare"]


@pytest.mark.parametrize("policy", ["half", "torch-cuda"])
def test_sparse_gradients_are_measured_like_dense_ones(policy: str) -> None:
    def model(sparse: bool) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(20, WIDTH, sparse=sparse), nn.Linear(WIDTH, 4))

    ids = torch.randint(0, 20, (3, 5))
    found: Sequence[Any] = [
        ampaudit.scan(model(sparse), ids, policy=policy, backward=True, loss=classes).backward
        for sparse in (True, False)
    ]
    assert found[0].parameters == found[1].parameters


def test_the_model_and_its_gradients_are_left_alone() -> None:
    case = HEALTHY[2]()
    case.model.train()
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    ampaudit.scan(case.model, case.inputs, backward=True, loss=case.loss)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_a_loss_takes_the_batch_where_it_asks_for_it(model_file: Any, cli: Any) -> None:
    path = model_file(
        "import torch.nn.functional as F\n"
        "def get_model(): return nn.Linear(8, 3)\n"
        "def batches():\n    yield {'x': torch.randn(4, 8), 'labels': torch.tensor([0, 1, 2, 0])}\n"
        "def model_inputs(batch): return batch['x']\n"
        "def loss(output, batch): return F.cross_entropy(output, batch['labels'])\n"
    )
    run = cli("scan", path, "--backward", "--policy", "torch-cuda")
    assert run.returncode == 0, run.stderr
    assert "Scale   65,536, dynamic (torch.amp.GradScaler)" in run.stdout
    assert "train mode" in run.stdout
    bf16 = cli("scan", path, "--backward", "--policy", "torch-cuda", "--dtype", "bfloat16", "--eval")
    assert "no loss scaling in bfloat16" in bf16.stdout
    assert "eval mode" in bf16.stdout


def test_bfloat16_needs_no_scale() -> None:
    case = PLANTED[0]()
    report = ampaudit.scan(
        case.model, case.inputs, policy="torch-cuda", dtype="bfloat16", backward=True, loss=case.loss
    )
    assert report.backward is not None
    assert report.backward.loss_scale == 1.0
    assert not [f for f in report.findings if f.code.startswith("AMP70")]


def test_cross_entropy_of_a_language_model_in_transformers() -> None:
    found = zoo.gpt2()
    kwargs = found.kwargs | {"labels": found.kwargs["input_ids"]}
    report = ampaudit.scan(found.model.eval(), kwargs, policy="torch-cuda", backward=True)
    exact = F.cross_entropy(
        found.model(**found.kwargs).logits[:, :-1].reshape(-1, 99),
        found.kwargs["input_ids"][:, 1:].reshape(-1),
    )
    assert report.backward is not None
    assert report.backward.losses[0].float32 == pytest.approx(exact.item(), rel=1e-5)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_the_quick_way_to_count_is_the_slow_one(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    lower = vector.half().float()
    counts = counts_on_cpu(vector, lower)
    assert torch.equal(counts[:-1], exponent_counts(vector))
    assert int(counts[-1]) == int(((lower == 0) & (vector != 0)).sum())


def test_a_scale_that_is_no_power_of_two_counts_the_same_exponents() -> None:
    case = HEALTHY[0]()
    options: dict[str, Any] = {"policy": "torch-cuda", "backward": True, "loss": case.loss}
    found = [ampaudit.scan(case.model, case.inputs, loss_scale=s, **options) for s in (1024.0, 1000.0)]
    first, second = (r.backward.parameters[0].gradient for r in found if r.backward is not None)
    assert sum(first.exponents.values()) == sum(second.exponents.values())
    moved = sum(abs(first.exponents.get(e, 0) - n) for e, n in second.exponents.items())
    assert moved <= 2  # an element that lies on the edge of two bins
    assert second.peak == pytest.approx(first.peak * 1000 / 1024, rel=1e-3)


def test_a_model_directory_takes_the_loss_of_the_inputs_file(tmp_path: Any, cli: Any) -> None:
    found = zoo.bert()
    found.model.save_pretrained(tmp_path / "model")
    inputs = tmp_path / "inputs.py"
    inputs.write_text(
        "import torch\n"
        "def batches():\n    yield {'input_ids': torch.randint(3, 99, (2, 12)), 'to': torch.zeros(1)}\n"
        "def model_inputs(batch): return {'input_ids': batch['input_ids']}\n"
        "def loss(output, batch=None): return (output.last_hidden_state - batch['to']).abs().mean()\n",
        encoding="utf-8",
    )
    run = cli("scan", tmp_path / "model", "--inputs", inputs, "--backward")
    assert run.returncode == 0, run.stderr
    assert "Window  2^" in run.stdout


def test_several_policies_say_which_scales_suit(cli: Any, model_file: Any) -> None:
    path = model_file(
        "def get_model(): return nn.Linear(8, 3)\n"
        "def example_inputs(): return torch.randn(4, 8)\n"
        "def loss(output): return output.float().square().mean()\n"
    )
    run = cli("scan", path, "--backward", "--policy", "torch-cuda,half", "--loss-scale", "131072")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("suit every layer") == 2
    alone = cli("scan", path, "--backward", "--policy", "half", "--loss-scale", "1e9")
    assert alone.returncode == 1
    assert "under the loss scale 1,000,000,000" in " ".join(alone.stdout.split())
    assert "--advise tries" not in alone.stdout
    refused = cli("scan", path, "--backward", "--advise")
    assert refused.returncode == 2
    assert "--backward cannot be combined with --advise" in refused.stderr


class Differs(nn.Module):
    """A difference of large products: in 16 bits, values behind it and gradients before it are inaccurate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.inner, self.head = nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.inner(self.norm(x))
        return {"output": self.head(hidden * 1001.3 - hidden * 1000.0)}


@pytest.mark.parametrize("policy", ["half", "apex-o2", "torch-cpu"])
def test_an_inaccurate_gradient_is_reported_wherever_its_parameter_is_stored(policy: str) -> None:
    """The oracle is a real backward pass in 16 bits, of a half-precision module or under autocast."""
    model, x, scale = Differs(), torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), 256.0
    exact, real = copy.deepcopy(model), copy.deepcopy(model)
    weighted(exact(x)).backward()
    if policy == "torch-cpu":
        with torch.autocast("cpu", dtype=torch.float16):
            loss = weighted(real(x))
    else:
        loss = weighted(real.half()(x.half()))
    (loss * scale).backward()
    accuracy = {}
    for (name, wide), low in zip(exact.named_parameters(), real.parameters(), strict=True):
        assert wide.grad is not None
        assert low.grad is not None
        error = low.grad.double() / scale - wide.grad
        accuracy[name] = float(20 * torch.log10(wide.grad.norm() / error.norm()))
    inaccurate = {f"gradient of {name}" for name, db in accuracy.items() if db < 20.0}
    assert len(inaccurate) == 5  # of all but the last bias
    report = ampaudit.scan(model, x, policy=policy, backward=True, loss=weighted, loss_scale=scale)
    assert {f.evidence.about for f in report.findings if f.code == "AMP704"} == inaccurate


@pytest.mark.gpu
@pytest.mark.parametrize("make", [*PLANTED, *HEALTHY], ids=lambda make: make.__name__)
def test_native_gradients_have_the_verdicts_of_emulated_ones(make: Callable[[], Case]) -> None:
    case = make()
    found = []
    for device in ("cpu", "cuda"):
        report = ampaudit.scan(
            case.model.to("cpu"),
            case.inputs,
            policy="torch-cuda",
            backward=True,
            loss=case.loss,
            device=device,
        )
        found.append({(f.code, f.layer) for f in report.findings if f.code.startswith("AMP7")})
    assert found[0] == found[1]


SWALLOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "divided away": lambda x: 5e4 / x.sum(),
    "a hyperbolic tangent": lambda x: torch.tanh(x.sum() / 7e4),
    "an exponential of the negative": lambda x: torch.exp(-x.sum() / 7e4),
    "clamped": lambda x: (x.sum() / 7e4).clamp(max=3.0),
    "a root of a square": lambda x: 300 / (x[0] * 300).square().sqrt(),
    "an angle": lambda x: torch.atan(x.sum() / 7e4),
    "finite": lambda x: x.mean(),
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_the_loss_is_that_of_a_real_half_model(name: str) -> None:
    """Also where an overflow is swallowed: the loss with the faults repaired is another number."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w.square().mean() + SWALLOWED[name](x)

    x = torch.ones(70_000)
    report = ampaudit.scan(Model(), (x,), policy="half", backward=True, loss=lambda output: output)
    assert report.backward is not None
    (seen,) = report.backward.losses
    with torch.no_grad():
        assert seen.float32 == pytest.approx(float(Model()(x)), rel=1e-5)
        assert seen.lower == pytest.approx(float(Model().half()(x.half())), rel=2e-3)
    assert (seen.repaired is None) == (name == "finite")
    assert not any(output.repaired for output in report.outputs)
