"""Watching a loop changes nothing in it, and says what brute force says; training runs and their mistakes."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import ampaudit
from ampaudit.core.errors import InputError, ReferenceBroken, UsageError
from ampaudit.render.render import for_terminal
from ampaudit.report.training import TrainingReport
from ampaudit.source.interface import Batch, ModelSource
from ampaudit.training.config import TrainConfig
from ampaudit.training.findings import diverged_at, findings_of
from ampaudit.training.train import train
from ampaudit.views.training import sparkline
from tests.support.saved import saved
from tests.support.training.cases import HEALTHY, WIDTH, Case, Stack, classes, rows


def fresh(number: int = 0) -> Case:
    torch.manual_seed(0)
    return HEALTHY[number]()


def loop(case: Case, optimizer: torch.optim.Optimizer, scaler: Any, steps: int, watch: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = case.loss(case.model(case.inputs))
        if watch is not None:
            watch.loss(loss)
        (scaler.scale(loss) if scaler else loss).backward()
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()


@pytest.mark.parametrize("with_scaler", [False, True])
def test_watching_changes_no_bit(with_scaler: bool) -> None:
    states = []
    for watched in (False, True):
        case = fresh(2)
        optimizer = torch.optim.Adam(case.model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu") if with_scaler else None
        if watched:
            with ampaudit.watch(case.model, optimizer, scaler, every=2) as seen:
                loop(case, optimizer, scaler, 6, seen)
        else:
            loop(case, optimizer, scaler, 6)
        states.append(case.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_what_is_seen_is_what_brute_force_says() -> None:
    case = fresh()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-5)
    with ampaudit.watch(case.model, optimizer, every=1) as seen:
        loop(case, optimizer, None, 1, seen)
    health = seen.health()
    again = fresh()
    other = torch.optim.AdamW(again.model.parameters(), lr=1e-5)
    again.loss(again.model(again.inputs)).backward()
    before = {n: p.detach().clone() for n, p in again.model.named_parameters()}
    other.step()
    for parameter in health.parameters:
        weight = dict(again.model.named_parameters())[parameter.name]
        gradient, old = weight.grad, before[parameter.name]
        assert gradient is not None
        assert parameter.gradient_peaks == (pytest.approx(gradient.abs().max().item()),)
        assert parameter.zero == pytest.approx((gradient == 0).float().mean().item())
        flushed = ((gradient != 0) & (gradient.half() == 0)).sum() / (gradient != 0).sum().clamp(min=1)
        assert parameter.flushed == pytest.approx(flushed.item())
        update = weight.detach() - old
        assert parameter.update_ratio == pytest.approx((update.norm() / old.norm()).item(), rel=1e-4)
        lost = ((old.half().float() + update).half() == old.half()) & ((update != 0) | (gradient != 0))
        meant = (update != 0) | (gradient != 0)
        assert parameter.lost == pytest.approx((lost.sum() / meant.sum()).item())
        second = other.state[weight]["exp_avg_sq"]
        vanished = (second > 0) & (second.half() == 0)
        assert parameter.state_flushed == pytest.approx((vanished.sum() / (second > 0).sum()).item())
    assert health.eps == 1e-8
    assert health.eps_held == 0.0


@pytest.mark.parametrize("shape", [(512, 784), (512, 512), (512, 256, 3, 3), (2000,), (1025,), (30_000, 4)])
def test_a_sample_follows_no_axis(shape: tuple[int, ...]) -> None:
    """Along each axis, a part of the gradient is zero: the sampled share is that of all elements."""
    for axis, size in enumerate(shape):
        for zeros in (slice(None, None, 3), slice(size // 2), slice(size // 2, None)):
            weight = nn.Parameter(torch.zeros(shape))
            weight.grad = torch.ones(shape)
            weight.grad[(slice(None),) * axis + (zeros,)] = 0.0
            model = nn.ParameterDict({"weight": weight})
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with ampaudit.watch(model, optimizer, every=1) as monitor:
                optimizer.step()
            (measured,) = monitor.health().parameters
            assert measured.zero == pytest.approx((weight.grad == 0).float().mean().item(), abs=0.06)


@pytest.mark.parametrize(
    ("autocast", "used", "codes"),
    [
        (torch.float16, 0, ["AMP715"]),  # perhaps float16 made it zero
        (torch.float16, 1, []),  # most gradients of an embedding are zero
        (torch.bfloat16, 0, []),  # has the range of float32
        (None, 0, []),
    ],
)
def test_a_gradient_is_called_flushed_only_if_float16_may_have_made_it_zero(
    autocast: torch.dtype | None, used: float, codes: list[str]
) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(100_000, 4), "head": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampaudit.watch(model, optimizer, every=1) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = model["head"](model["table"](torch.tensor([77])) * used).square().mean()
            loss.backward()
            monitor.loss(loss)
            optimizer.step()
    assert [finding.code for finding in monitor.report().findings] == codes


@pytest.mark.parametrize(
    ("norm", "linear", "codes"),
    [
        (torch.float32, torch.bfloat16, ["AMP713"]),  # the layer with most updates loses them
        (torch.bfloat16, torch.float32, []),  # float32 loses none
        (torch.float64, torch.float64, []),
        (torch.complex64, torch.complex64, []),
    ],
)
def test_each_parameter_is_judged_by_the_dtype_in_which_it_is_stored(
    norm: torch.dtype, linear: torch.dtype, codes: list[str]
) -> None:
    torch.manual_seed(0)
    weights = {"norm": torch.zeros(16, dtype=norm), "weight": torch.randn(64, 16).to(linear)}
    model = nn.ParameterDict({name: nn.Parameter(weight) for name, weight in weights.items()})
    before = model["weight"].detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    with ampaudit.watch(model, optimizer, every=1) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            (model["weight"] * (1 + model["norm"])).abs().square().sum().backward()
            optimizer.step()
    unchanged = (model["weight"] == before).float().mean().item()
    assert (unchanged > 0.5) == bool(codes)
    assert [finding.code for finding in monitor.report().findings] == codes


def test_skipped_steps_and_scales_are_seen() -> None:
    weight = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    with ampaudit.watch(weight, optimizer, scaler, every=1) as seen:
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(weight(torch.ones(1)).sum()).backward()
            if step == 1:
                weight.weight.grad = torch.full((1, 1), float("inf"))
            scaler.step(optimizer)
            scaler.update()
    health = seen.health()
    assert [step.skipped for step in health.steps] == [False, True, False, False, False]
    assert [step.scale for step in health.steps] == [65536.0, 65536.0, 32768.0, 32768.0, 65536.0]
    assert health.watched == (0, 2, 3, 4)
    assert "update" not in scaler.__dict__


@pytest.mark.parametrize("ours", [False, True])
def test_fused_optimizers_divide_and_skip_by_themselves(ours: bool) -> None:
    """They are called in a skipped step, too, with gradients that still have the scale in them."""
    seen = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = ampaudit.scaler("torch", "cpu") if ours else torch.amp.GradScaler("cpu")
        with ampaudit.watch(model, optimizer, scaler, every=1) as watching:
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
                if step == 1:
                    model.weight.grad = torch.full((1, 4), float("inf"))
                scaler.step(optimizer)
                scaler.update()
        seen.append(watching.health())
    plain, fused_health = seen
    assert (
        [s.skipped for s in fused_health.steps]
        == [s.skipped for s in plain.steps]
        == [False, True, False, False]
    )
    assert [s.scale for s in fused_health.steps] == [s.scale for s in plain.steps]
    first, second = plain.parameters[0], fused_health.parameters[0]
    finite = [peak for peak in second.gradient_peaks if peak is not None]
    assert finite == pytest.approx(first.gradient_peaks, rel=1e-3)
    assert second.update_ratio == pytest.approx(first.update_ratio, rel=0.5)


def test_hooks_come_off_when_the_loop_fails() -> None:
    case = fresh()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ZeroDivisionError), ampaudit.watch(case.model, optimizer, scaler):
        raise ZeroDivisionError
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert "update" not in scaler.__dict__


def test_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # what cannot be saved is kept
    case = fresh()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    with ampaudit.watch(case.model, optimizer, every=3) as seen:
        loop(case, optimizer, None, 7, seen)
    seen.save(tmp_path / "health.json")
    data = json.loads((tmp_path / "health.json").read_text())
    assert data["schema"] == 1
    health = data["variants"][0]["health"]
    assert health["watched"] == [0, 3, 6]
    assert len(health["steps"]) == 7
    assert health["steps"][0]["loss"] > 0
    with pytest.raises(ampaudit.AuditError, match=r"exists"):
        seen.save(tmp_path / "health.json")


def test_mistakes_in_watching() -> None:
    case = fresh()
    optimizer = torch.optim.SGD(Stack().parameters(), lr=0.1)
    with pytest.raises(UsageError, match="holds no parameter of the model"):
        ampaudit.watch(case.model, optimizer)
    with pytest.raises(UsageError, match="at least 1"):
        ampaudit.watch(case.model, torch.optim.SGD(case.model.parameters(), lr=0.1), every=0)


def test_sparse_gradients_and_unused_parameters_are_watched() -> None:
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
    model.spare = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampaudit.watch(model, optimizer, every=1) as seen:
        output = model[1](model[0](torch.tensor([1, 2])))
        output.square().mean().backward()
        optimizer.step()
    found = {p.name: p for p in seen.health().parameters}
    assert set(found) == {"0.weight", "1.weight", "1.bias"}
    assert found["0.weight"].zero == pytest.approx(18 / 20)


def test_complex_parameters_are_watched_by_their_parts() -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.complex(torch.ones(6), torch.zeros(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(x * self.turn).square().sum()

    model = Rotation()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampaudit.watch(model, optimizer, every=1) as seen:
        model(torch.complex(torch.arange(6.0), torch.zeros(6))).backward()
        assert model.turn.grad is not None
        parts = torch.view_as_real(model.turn.grad.clone())
        optimizer.step()
    (found,) = seen.health().parameters
    assert found.gradient_peaks == (parts.abs().max().item(),)
    assert found.zero == pytest.approx((parts == 0).float().mean().item())


def test_a_lazy_layer_has_nothing_to_watch_yet() -> None:
    model = nn.LazyLinear(4)
    with pytest.raises(UsageError, match="lazy layers without a shape"):
        ampaudit.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("name", ["Adafactor", "Adam", "SGD"])
@pytest.mark.parametrize("policy", ["apex-o2", "apex-o3"])
def test_optimizers_may_have_a_pair_for_eps_or_none(name: str, policy: str) -> None:
    report = train(source(classes, optimizer=getattr(torch.optim, name)), steps=3, policies=(policy,))
    eps = {variant.health.eps for variant in report.variants}
    assert eps == {1e-8 if name == "Adam" else None}


def test_sparse_gradients_train_under_emulation() -> None:
    made = {}
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 4, sparse=sparse), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        prepared = ampaudit.prepare(model, optimizer, policy="apex-o2", emulate=True)
        for index in range(3):
            optimizer.zero_grad()
            loss = prepared.model(torch.tensor([1, 2, 3 + index])).square().mean()
            prepared.scaler.scale(loss).backward()
            prepared.scaler.step(optimizer)
            prepared.scaler.update()
        made[sparse] = model[0].weight
    assert torch.equal(made[True], made[False])


def test_divergence_is_judged_on_smoothed_curves() -> None:
    reference = [1.0 / (1 + step / 10) for step in range(100)]
    assert diverged_at(reference, reference) is None
    noisy = [value * (1.2 if step % 2 else 0.8) for step, value in enumerate(reference)]
    assert diverged_at(noisy, reference) is None
    away = [1.5 * value if step > 50 else value for step, value in enumerate(reference)]
    assert diverged_at(away, reference) in range(49, 60)
    assert diverged_at([*reference[:50], 9.0, *reference[51:]], reference) is None  # comes back
    assert diverged_at([*reference[:90], *[None] * 10], reference) == 90
    assert diverged_at([0.5 * value for value in reference], reference) is None  # better is not worse


def saved_training() -> TrainingReport:
    report = saved("training")
    assert isinstance(report, TrainingReport)
    return report


def test_the_picture_marks_the_run_that_became_nan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ampaudit.views import training_plot

    report = saved_training()
    losses = {v.name: [step.loss for step in v.health.steps] for v in report.variants}
    first = losses["apex-o3"].index(None)
    assert None not in losses["fp32"] + losses["torch.amp"]
    figures: list[Any] = []
    monkeypatch.setattr(training_plot, "save_figure", lambda figure, *_, **__: figures.append(figure))
    training_plot.plot_training(report, tmp_path / "x.svg")
    axes = figures[0].axes[0]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["fp32", "torch.amp", f"apex-o3: NaN or infinite from step {first}"]
    (mark,) = [line for line in axes.lines if line.get_marker() == "X"]
    assert list(mark.get_xdata()) == [first]
    assert list(mark.get_ydata()) == [losses["apex-o3"][first - 1]]
    assert mark.get_color() == axes.get_legend().get_lines()[2].get_color()


def test_a_run_that_deviates_is_never_said_to_follow() -> None:
    """With --fail-on never, and for torch.amp, which is not judged, the verdict is a pass all the same."""
    report = replace(saved_training(), verdict="pass")
    stream = io.StringIO()
    Console(width=200, file=stream).print(for_terminal(report, -1))
    assert "PASS  torch.amp: the loss follows FP32's; apex-o3: it deviates (2 findings)" in stream.getvalue()


@pytest.mark.parametrize(
    ("diverged", "words"),
    [(0, "in all 8 steps"), (3, "in the last 5 of 8 steps"), (7, "in the last of 8 steps")],
)
def test_a_run_that_deviates_says_in_how_many_steps(diverged: int, words: str) -> None:
    """Steps are numbered from 0, which "step 3 of 8" would not say."""
    variant = next(v for v in saved_training().variants if v.name == "apex-o3")
    variant = replace(
        variant, diverged=diverged, health=replace(variant.health, steps=variant.health.steps[:8])
    )
    cause = next(finding.cause for finding in findings_of(variant, variant) if finding.code == "AMP711")
    assert f"{words} the loss deviates from FP32's" in cause


def test_sparklines() -> None:
    assert len(sparkline([1.0] * 100, 0.0, 2.0, 10)) == 10
    assert "!" in sparkline([1.0, None, 1.0], 0.0, 1.0, 3)
    assert sparkline([], 0.0, 1.0) == ""
    low, *_, high = sparkline([0.0, 0.5, 1.0], 0.0, 1.0, 3)
    assert low != high


def source(loss: Callable[..., Any] | None, model: nn.Module | None = None, **options: Any) -> ModelSource:
    return ModelSource("m", "object", model or Stack(), (Batch((rows(),)),), loss=loss, **options)


def test_mistakes_in_training() -> None:
    settings = TrainConfig(steps=3, policies=("torch-cuda",))
    with pytest.raises(InputError, match="there is no loss"):
        train(source(None), config=settings)
    with pytest.raises(ReferenceBroken, match=r"FP32 loss is nan in step 0 \(counted from 0\)"):
        train(source(lambda y: (y - 1e9).sqrt().mean()), config=settings)
    with pytest.raises(InputError, match="no parameter gets a gradient"):
        train(source(lambda y: y.detach().mean().requires_grad_()), config=settings)
    with pytest.raises(InputError, match="no parameter gets a gradient"):
        train(source(lambda y: y.detach().mean()), config=settings)
    complex_layer = nn.Linear(8, 4, dtype=torch.complex64)
    with pytest.raises(UsageError, match="complex parameters"):
        train(source(classes, nn.Sequential(Stack(), complex_layer)), config=settings)
    with pytest.raises(InputError, match="no parameter of the model requires"):
        train(source(classes, Stack().requires_grad_(False)), config=settings)
    with pytest.raises(UsageError, match="LBFGS"):
        train(source(classes, optimizer=torch.optim.LBFGS), config=settings)
    with pytest.raises(InputError, match=r"optimizer.params. returned list"):
        train(source(classes, optimizer=list), config=settings)
    with pytest.raises(UsageError, match="steps = 0"):
        train(source(classes), steps=0)
    with pytest.raises(UsageError, match="named twice"):
        train(source(classes), steps=1, policies=("half", "half"))


def test_an_optimizer_without_foreach_and_frozen_layers_train() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= group["lr"] * parameter.grad

    model = Stack()
    model.first.requires_grad_(False)
    model.spare = nn.Linear(2, 2)
    made = source(classes, model, optimizer=Plain)
    report = train(made, steps=6, policies=("torch-cuda",))
    names = {p.name for p in report.variants[1].health.parameters}
    assert names == {
        f"{layer}.{kind}" for layer in ("second", "third", "head") for kind in ("weight", "bias")
    }
    assert report.notes == ("1 batches for 6 steps: they were used again",)
    assert report.exit_code == 0


def test_dropout_is_the_same_in_all_runs() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    report = train(source(classes, model), steps=5, policies=("torch-cuda",))
    exact, lower = ([step.loss for step in v.health.steps] for v in report.variants)
    assert lower == pytest.approx(exact, rel=5e-3)


def test_a_policy_that_looks_at_values_sees_the_first_batch() -> None:
    class Large(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            large = self.second(torch.relu(self.first(x)))
            return self.head(torch.nn.functional.layer_norm(large, (WIDTH,)))

    case = Large()
    with torch.no_grad():
        case.second.weight.mul_(3e6)
    optimizer = torch.optim.SGD(case.parameters(), lr=1e-3)
    prepared = ampaudit.prepare(case, optimizer, policy="ampaudit", emulate=True)
    assert prepared.model(rows()).isfinite().all()
    plain = ampaudit.prepare(case, optimizer, policy="torch-cuda", emulate=True)
    assert not plain.model(rows()).isfinite().all()


def test_the_command(
    cli: Callable[..., subprocess.CompletedProcess[str]], model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    path = model_file(
        "def get_model(): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))\n"
        "def batches():\n    while True:\n        yield torch.randn(16, 8)\n"
        "def loss(output, batch): return (output - batch[:, :1]).square().mean()\n"
        "def metric(output, batch): return -(output - batch[:, :1]).abs().mean()\n"
    )
    picture, file = tmp_path / "curves.svg", tmp_path / "report.json"
    done = cli("train", path, "--steps", "12", "--policy", "apex-o2", "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert "PASS  torch.amp, apex-o2: the loss follows FP32's" in done.stdout
    assert picture.read_text().count("<path") > 10
    assert cli("train", path, "--plot", picture).returncode == 2
    assert cli("train", path, "--steps", "4", "--format", "json", "-o", file).returncode == 0
    data = json.loads(file.read_text())
    assert [variant["name"] for variant in data["variants"]] == ["fp32", "torch.amp", "ampaudit"]
    assert cli("train", path, "--steps", "4", "--loss-scale", "deepsped").returncode == 2
    assert cli("train", path, "--steps", "4", "--loss-scale", "-3").returncode == 2
    assert cli("train", path, "--steps", "4", "--plot", tmp_path / "x.doc").returncode == 2


def test_the_report_is_readable_at_any_width() -> None:
    report = train(source(classes), steps=4, policies=("apex-o3",))
    for width in (60, 80, 200):
        stream = io.StringIO()
        Console(width=width, file=stream).print(for_terminal(report, 1))
        text = stream.getvalue()
        assert "apex-o3" in text
        assert all(len(line) <= width for line in text.splitlines())


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # infinite on purpose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)))


def steps(
    model: nn.Module, *, autocast: torch.dtype | None = None, dtype: Any = None, spoil: int | None = None
) -> TrainingReport:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(8, 4, dtype=next(model.parameters()).dtype)
    with ampaudit.watch(model, optimizer, scaler, every=2, dtype=dtype) as seen:
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(x * torch.inf if step == spoil else x).float().square().mean()
            seen.loss(loss)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return seen.report()


@pytest.mark.parametrize(
    ("stored", "autocast", "given", "expected", "why"),
    [
        (torch.float32, None, None, "float16", "by default"),
        (torch.float32, torch.bfloat16, None, "bfloat16", "the format of autocast"),
        (torch.float32, torch.float16, None, "float16", "the format of autocast"),
        (torch.bfloat16, None, None, "bfloat16", "the format of the parameters"),
        (torch.float32, torch.float16, "bfloat16", "bfloat16", ""),
        (torch.bfloat16, None, torch.float16, "float16", ""),
    ],
)
def test_a_loop_is_judged_by_its_own_format(
    stored: torch.dtype, autocast: torch.dtype | None, given: Any, expected: str, why: str
) -> None:
    report = steps(Normalized().to(stored), autocast=autocast, dtype=given)
    assert report.dtype == report.variants[0].health.dtype == expected
    notes = [note for note in report.notes if note.startswith("judged by")]
    assert len(notes) == bool(why)
    assert not why or why in notes[0]
    assert not any("eps" in finding.cause for finding in report.findings) or expected == "float16"


def test_statistics_that_a_skipped_step_spoils_are_named() -> None:
    assert steps(Normalized()).verdict == "pass"
    torch.manual_seed(0)
    report = steps(Normalized(), spoil=3)
    assert report.verdict == "fail"
    (finding,) = [finding for finding in report.findings if finding.code == "AMP711"]
    assert "norm.running_mean and 1 other buffer" in finding.cause
    assert "are NaN or infinite since step 3 (counted from 0)" in finding.cause


def test_statistics_that_are_finite_again_are_not() -> None:
    class Latest(Normalized):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Identity()
            self.register_buffer("latest", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.latest.copy_(x.mean())
            return super().forward(x)

    assert steps(Latest(), spoil=2).verdict == "pass"
    assert steps(Latest(), spoil=5).verdict == "fail"
