"""A loss is booked to its own step wherever a loop records it; an oracle is the loop's own list."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampaudit
from ampaudit.core.errors import UsageError
from ampaudit.render.render import for_terminal
from ampaudit.report.training import TrainingReport

STEPS = 7
PLACES = ("before backward", "after backward", "after step", "after update", "after zero_grad", "later")
Forms: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda loss: loss,
    "detached": lambda loss: loss.detach(),
    "number": lambda loss: loss.item(),
    "derived": lambda loss: loss * 1.0,
}


def unrecorded(monitor: ampaudit.TrainingMonitor) -> tuple[str, ...]:
    """What the report says was left out."""
    return tuple(note for note in monitor.report().notes if not note.startswith("judged by"))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def objective(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(x), x[:, :1])


def text_of(report: TrainingReport) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(width=120, file=stream).print(for_terminal(report, 1))
    return stream.getvalue()


def booked(monitor: ampaudit.TrainingMonitor) -> list[float | None]:
    return [step.loss for step in monitor.health().steps]


def check(monitor: ampaudit.TrainingMonitor, expected: list[float], skipped: list[int] | None = None) -> None:
    """Compare the record and all that is said about it with the loop's own list."""
    health = monitor.health()
    assert len(health.steps) == len(expected)
    for step, loss in zip(health.steps, expected, strict=True):
        assert step.recorded
        assert step.broken is not math.isfinite(loss)
        assert step.loss == (pytest.approx(loss) if math.isfinite(loss) else None)
    assert [step.step for step in health.steps if step.skipped] == (skipped or [])
    report = monitor.report()
    text = text_of(report)
    assert "FP32" not in text
    assert f"{len(expected)} steps of {report.optimizer} on cpu" in text
    for unmeasured in ("0 ms", "0 B", " of  on", "Memory", "metric"):
        assert unmeasured not in text
    healthy = all(map(math.isfinite, expected))
    assert ("not finite" in text) is not healthy
    assert report.verdict == ("pass" if healthy else "fail")
    assert text.splitlines()[2].startswith("PASS" if healthy else "FAIL")


@contextmanager
def watching(closes: bool, *args: Any, **options: Any) -> Iterator[ampaudit.TrainingMonitor]:
    if closes:
        monitor = ampaudit.watch(*args, **options)
        yield monitor
        monitor.close()
    else:
        with ampaudit.watch(*args, **options) as monitor:
            yield monitor


@pytest.mark.parametrize("scaler", ["", "torch", "ours"])
@pytest.mark.parametrize("form", Forms)
@pytest.mark.parametrize("place", PLACES)
def test_any_order(place: str, form: str, scaler: str) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    made = {"": None, "torch": torch.amp.GradScaler("cpu"), "ours": ampaudit.scaler("torch", "cpu")}[scaler]
    if place == "later" and form in ("detached", "number"):
        form = "tensor"  # a number has no graph that would tell
    own: list[float] = []
    late: list[torch.Tensor] = []
    with watching(form == "number", net, optimizer, made, every=2) as monitor:
        for step in range(STEPS):
            loss = objective(net, batch(step))
            own.append(loss.item())

            def at(here: str, loss: torch.Tensor = loss) -> None:
                if here == place:
                    monitor.loss(Forms[form](loss))

            at("before backward")
            (made.scale(loss) if made else loss).backward()
            at("after backward")
            made.step(optimizer) if made else optimizer.step()
            at("after step")
            if made:
                made.update()
            at("after update")
            optimizer.zero_grad()
            at("after zero_grad")
            late.append(loss)
        if place == "later":
            for loss in late:
                monitor.loss(Forms[form](loss))
    check(monitor, own)


@pytest.mark.parametrize("place", ["each", "after step"])
@pytest.mark.parametrize("form", ["tensor", "number"])
def test_accumulation(place: str, form: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own: list[float] = []
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        parts: list[float] = []
        for index in range(12):
            loss = objective(net, batch(index))
            (loss / 3).backward()
            parts.append(loss.item())
            if place == "each":
                monitor.loss(Forms[form](loss))
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                own.append(sum(parts) / 3)
                parts.clear()
            if place == "after step":
                monitor.loss(Forms[form](loss))
    check(monitor, own)


@pytest.mark.parametrize("inside", [True, False])
def test_closures(inside: bool) -> None:
    """The loss of a step is that of the weights it begins with, and so are its gradients."""
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    own, peaks = [], []
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for step in range(4):
            twin = model()
            twin.load_state_dict(net.state_dict())
            objective(twin, batch(step)).backward()
            peaks.append(twin[0].weight.grad.abs().max().item())  # type: ignore[union-attr, operator]

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = objective(net, batch(step))
                if inside:
                    monitor.loss(loss)
                loss.backward()
                return loss

            first = optimizer.step(closure)  # type: ignore[arg-type]
            own.append(first.item())
            if not inside:
                monitor.loss(first)
    check(monitor, own)
    weight = {p.name: p for p in monitor.health().parameters}["0.weight"]
    assert weight.gradient_peaks == pytest.approx(tuple(peaks))


@pytest.mark.parametrize(
    ("zeroing", "to_none"),
    [(place, True) for place in ("first", "before backward", "after step")]
    # zeros written in place are no backward pass
    + [("first", False), ("before backward", False), ("after step", False)],
)
@pytest.mark.parametrize("factor", [math.nan, 100.0])
@pytest.mark.parametrize("form", ["tensor", "number"])
def test_a_loop_that_leaves_batches_out(form: str, factor: float, zeroing: str, to_none: bool) -> None:
    """A NaN, or a loss that is too large, is recorded, and then there is no backward pass."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = []
    with ampaudit.watch(net, optimizer, every=2) as monitor:
        for step in range(STEPS):
            if zeroing == "first":
                optimizer.zero_grad(to_none)
            x = batch(step)
            loss = objective(net, x * factor if step in (0, 3, 4) else x)
            monitor.loss(Forms[form](loss))
            if not loss < 100:
                continue
            if zeroing == "before backward":
                optimizer.zero_grad(to_none)
            loss.backward()
            optimizer.step()
            if zeroing == "after step":
                optimizer.zero_grad(to_none)
            own.append(loss.item())
    check(monitor, own)
    assert len(own) == STEPS - 3
    assert unrecorded(monitor) == ("3 recorded losses left out: the loop took no step on them",)


@pytest.mark.parametrize("place", ["before backward", "after backward"])
def test_a_loop_that_leaves_gradients_out(place: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = []
    with ampaudit.watch(net, optimizer, every=2) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = objective(net, batch(step))
            if place == "before backward":
                monitor.loss(loss.item())
            loss.backward()
            if place == "after backward":
                monitor.loss(loss.item())
            if step in (1, 4):
                continue
            optimizer.step()
            own.append(loss.item())
    check(monitor, own)


@pytest.mark.parametrize("form", ["tensor", "derived"])
def test_two_losses_of_one_step(form: str) -> None:
    """Each is recorded when it is made, and one backward pass goes through both."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    own = []
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            first = objective(net, batch(step))
            monitor.loss(Forms[form](first))
            second = 10 * objective(net, batch(STEPS + step))
            monitor.loss(Forms[form](second))
            (first + second).backward()
            optimizer.step()
            own.append((first.item() + second.item()) / 2)
    check(monitor, own)
    assert not unrecorded(monitor)


@pytest.mark.parametrize("place", ["before backward", "after backward"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("form", ["tensor", "number"])
def test_accumulation_over_heads(form: str, to_none: bool, place: str) -> None:
    """A head that is used once has a gradient which later backward passes leave alone."""
    net = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = []
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad(to_none)
            parts = []
            for part, head in enumerate((0, 1, 1)):
                loss = net[head](batch(3 * step + part)).square().mean()
                if place == "before backward":
                    monitor.loss(Forms[form](loss))
                loss.backward()
                if place == "after backward":
                    monitor.loss(Forms[form](loss))
                parts.append(loss.item())
            optimizer.step()
            own.append(sum(parts) / 3)
    check(monitor, own)
    assert not unrecorded(monitor)


@pytest.mark.parametrize("form", ["detached", "number"])
@pytest.mark.parametrize("often", [1, 3])
def test_a_number_after_what_autograd_records(often: int, form: str) -> None:
    """The norm of weights that a loop prints after a step is no forward pass."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = {}
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = objective(net, batch(step))
            loss.backward()
            optimizer.step()
            if step % often == 0:
                assert torch.stack([p.norm() for p in net.parameters()]).sum().requires_grad
                monitor.loss(Forms[form](loss))
                own[step] = loss.item()
    assert {s.step: s.loss for s in monitor.health().steps if s.recorded} == pytest.approx(own)


def test_a_parameter_that_is_unfrozen_is_followed_and_nothing_stays() -> None:
    net = model()
    net[0].requires_grad_(False)  # type: ignore[union-attr, operator]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ampaudit.watch(net, optimizer, every=1):
        copied = copy.deepcopy(net)
        objective(net, batch(0)).backward()
        optimizer.step()
        net.requires_grad_(True)
        objective(net, batch(0)).backward()
        optimizer.step()
        assert all(p._post_accumulate_grad_hooks for p in net.parameters())
        assert not any(p._post_accumulate_grad_hooks for p in copied.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_parts_that_are_trained_in_turn() -> None:
    """Gradients of the step before are still there when others appear."""
    net = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = []
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for step in range(STEPS):
            loss = net[(step + 1) % 2](batch(step)).square().mean()
            loss.backward()
            monitor.loss(loss)
            optimizer.step()
            own.append(loss.item())
    check(monitor, own)


@pytest.mark.parametrize("place", ["before backward", "after backward", "both"])
def test_a_loss_that_is_recorded_twice(place: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = []
    with ampaudit.watch(net, optimizer, every=2) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = objective(net, batch(step))
            for _ in range({"before backward": 2, "both": 1}.get(place, 0)):
                monitor.loss(loss)
            loss.backward()
            for _ in range({"after backward": 2, "both": 1}.get(place, 0)):
                monitor.loss(loss.item())
            optimizer.step()
            own.append(loss.item())
    check(monitor, own)
    assert not unrecorded(monitor)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_bad_batch_of_an_accumulated_step(bad: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for index in range(9):
            loss = objective(net, batch(index) * (math.inf if index == 3 + bad else 1.0))
            monitor.loss(loss)
            (loss / 3).backward()
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [step.broken for step in monitor.health().steps] == [False, True, True]
    assert monitor.report().verdict == "fail"


def test_a_loop_that_breaks() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = []
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for step in range(STEPS):
            loss = objective(net, batch(step) * (math.inf if step == 4 else 1.0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.loss(loss)
            own.append(loss.item())
    check(monitor, own)
    (cause,) = {f.cause for f in monitor.report().findings}
    assert "NaN or infinite in 3 of 7 recorded steps, first in step 4 (counted from 0)" in cause
    assert "a gradient is NaN or infinite in 3 of 7 measured steps" in cause


def test_a_skipped_step_is_no_broken_run() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with ampaudit.watch(net, optimizer, scaler, every=1) as monitor:
        for step in range(STEPS):
            loss = objective(net, batch(step) * (math.inf if step == 0 else 1.0))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.loss(loss)
    steps = monitor.health().steps
    assert [step.step for step in steps if step.skipped] == [0]
    assert [step.step for step in steps if step.broken] == [0]
    assert monitor.report().verdict == "pass" or {f.code for f in monitor.report().findings} == {"AMP712"}


@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers(together: bool) -> None:
    """Two networks with losses of their own and one scaler: an update for both steps, or after each."""
    nets = [model(), nn.Linear(4, 1)]
    both = nn.ModuleList(nets)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    own: list[list[float]] = [[], []]
    with ampaudit.watch(both, optimizers, scaler, every=1) as monitor:
        for step in range(STEPS):
            for index, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                optimizer.zero_grad()
                loss = objective(net, batch(step))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                monitor.loss(loss, optimizer=optimizer)
                own[index].append(loss.item())
                if not together:
                    scaler.update()
            if together:
                scaler.update()
    for index in range(2):
        health = monitor.health(index)
        assert [step.loss for step in health.steps] == pytest.approx(own[index])
        assert not health.skipped
        assert {step.scale for step in health.steps} == {1024.0}
    names = [variant.name for variant in monitor.report().variants]
    assert names == ["optimizer 0 (Adam)", "optimizer 1 (Adam)"]
    assert {p.name for p in monitor.health(1).parameters} == {"1.weight", "1.bias"}
    with pytest.raises(UsageError, match="not watched"):
        monitor.loss(1.0, optimizer=torch.optim.SGD(both.parameters(), lr=0.1))


@pytest.mark.parametrize("each", [True, False])
def test_a_number_after_the_steps_of_several_optimizers(each: bool) -> None:
    """What one book of losses counts is no forward pass to another."""
    net = model()
    optimizers = [torch.optim.SGD(net[index].parameters(), lr=0.1) for index in (0, 2)]  # type: ignore[index]
    own = []
    with ampaudit.watch(net, optimizers, every=1) as monitor:
        for step in range(STEPS):
            loss = objective(net, batch(step))
            net.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers if each else [None]:
                monitor.loss(loss.item(), optimizer=optimizer)
            own.append(loss.item())
    for index in range(2):
        assert [step.loss for step in monitor.health(index).steps] == pytest.approx(own)


def test_a_scaler_keeps_the_wrappers_of_the_loop() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    calls: list[str] = []

    def wrap(name: str) -> Callable[..., Any]:
        inner = scaler.step

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        scaler.step = wrapper  # type: ignore[method-assign]
        return wrapper

    before = wrap("before")
    with ampaudit.watch(net, optimizer, scaler), ampaudit.watch(net, optimizer, scaler):
        assert scaler.step is not before
    assert scaler.step is before
    with ampaudit.watch(net, optimizer, scaler) as monitor:
        inside = wrap("inside")
    assert scaler.step is inside
    scaler.scale(objective(net, batch(0))).backward()
    scaler.step(optimizer)
    assert calls == ["inside", "before"]
    assert monitor.step == 0


def test_monitors_of_one_scaler_close_in_any_order() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(objective(net, batch(0))).backward()
        scaler.step(optimizer)
        scaler.update()

    first, second = (ampaudit.watch(net, optimizer, scaler) for _ in range(2))
    step()
    first.close()
    step()
    second.close()
    step()
    assert [first.step, second.step] == [1, 2]
    third = ampaudit.watch(net, optimizer, scaler)
    third.close()
    assert not {name for name in vars(scaler) if not name.startswith("_")}


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_nobody_named(fused: bool) -> None:
    """Its scale tells which gradients would be flushed; a skip before the first step is not seen."""
    found = []
    for named in (True, False):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        own = []
        with ampaudit.watch(net, optimizer, scaler if named else None, every=1) as monitor:
            for step in range(STEPS):
                loss = objective(net, batch(step)) * 1e-6
                monitor.loss(loss)
                scaler.scale(loss).backward()
                if step in (0, 4):
                    net[0].weight.grad.fill_(math.inf)  # type: ignore[index, union-attr, operator]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                own.append(loss.item())
        assert not {name for name in vars(scaler) if not name.startswith("_")}
        health = monitor.health()
        unseen = 0 if named or fused else 1
        assert booked(monitor) == pytest.approx(own[unseen:])
        assert [step.skipped for step in health.steps] == [s in (0, 4) for s in range(STEPS)][unseen:]
        assert [s.scale for s in health.steps] == [65536.0, *[32768.0] * 4, *[16384.0] * 2][unseen:]
        assert {f.code for f in monitor.report().findings} <= {"AMP712"}
        found.append({p.name: p.flushed for p in health.parameters})
    assert found[0] == pytest.approx(found[1])


def test_watching_goes_on() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = ampaudit.watch(net, optimizer)
    own = []
    for _ in range(2):
        with monitor:
            for step in range(3):
                optimizer.zero_grad()
                loss = objective(net, batch(step))
                loss.backward()
                optimizer.step()
                monitor.loss(loss)
                own.append(loss.item())
        optimizer.step()  # not watched
    check(monitor, own)


@pytest.mark.parametrize("given", [True, False])
def test_accelerate(given: bool) -> None:
    """Its optimizer and scaler are found inside its wrappers."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    raw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer = accelerator.prepare(net, raw)
    own = []
    with ampaudit.watch(net, optimizer, accelerator.scaler if given else None, every=2) as monitor:
        for step in range(STEPS):
            with accelerator.accumulate(net):
                loss = objective(net, batch(step))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            monitor.loss(loss.item())
            own.append(loss.item())
    check(monitor, own)


def test_a_step_that_calls_its_base_and_one_that_fails() -> None:
    class Clipped(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ZeroDivisionError
            return super().step(closure)

    torch.optim.SGD(model().parameters(), lr=0.1)  # torch puts its hooks around SGD.step as well
    net = model()
    optimizer = Clipped(net.parameters(), lr=0.1)
    own = []
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for step in range(STEPS):
            loss = objective(net, batch(step))
            loss.backward()
            optimizer.fails = step == 2
            try:
                optimizer.step()
            except ZeroDivisionError:
                continue
            finally:
                optimizer.zero_grad()
            monitor.loss(loss)
            own.append(loss.item())
    check(monitor, own)


def test_parameters_that_join_later() -> None:
    net = model()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)  # type: ignore[index]
    with ampaudit.watch(net, optimizer, every=1) as monitor:
        for step in range(2):
            loss = objective(net, batch(step))
            loss.backward()
            optimizer.step()
            if step == 0:
                optimizer.add_param_group({"params": net[2].parameters()})  # type: ignore[index]
    found = {p.name: len(p.gradient_peaks) for p in monitor.health().parameters}
    assert found == {"0.weight": 2, "0.bias": 2, "2.weight": 1, "2.bias": 1}


def test_a_compiled_model_keeps_its_names() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapped = torch.compile(net, backend="eager")
    own = []
    with ampaudit.watch(wrapped, optimizer, every=1) as monitor:  # type: ignore[arg-type]
        for step in range(3):
            optimizer.zero_grad()
            loss = objective(wrapped, batch(step))  # type: ignore[arg-type]
            loss.backward()
            optimizer.step()
            monitor.loss(loss)
            own.append(loss.item())
    check(monitor, own)
    assert {p.name for p in monitor.health().parameters} == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("parallel", [False, True])
def test_a_prepared_model_keeps_its_name(parallel: bool) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    prepared = ampaudit.prepare(net, optimizer, emulate=True)
    wrapped = nn.DataParallel(prepared.model) if parallel else prepared.model
    own = []
    with ampaudit.watch(wrapped, optimizer, prepared.scaler, every=1) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            loss = objective(prepared.model, batch(step))
            prepared.scaler.scale(loss).backward()
            prepared.scaler.step(optimizer)
            prepared.scaler.update()
            monitor.loss(loss.item())
            own.append(loss.item())
    check(monitor, own)
    assert monitor.report().headline == "PASS Sequential: 3 watched steps"


def test_what_was_not_measured_is_left_out() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ampaudit.watch(net, optimizer) as monitor:
        nothing = text_of(monitor.report())
        objective(net, batch(0)).backward()
        optimizer.step()
    text = text_of(monitor.report())
    assert "WARN  no step was watched" in nothing
    assert "PASS  no error in 1 watched step" in text
    assert "Sequential: 1 step of SGD on cpu" in text
    assert "no loss was recorded" in text
    assert text.count("run  ") == 0  # no table of names alone
    for word in ("FP32", "not finite", "curve", " ms", " B", "first", "skipped", "Memory"):
        assert word not in text + nothing, word
    variant = monitor.report().variants[0]
    assert (variant.seconds, variant.bytes_held, variant.final_loss) == (None, None, None)
    assert monitor.report().seed is None


def test_mistakes_are_said() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for arguments, message in (
        ((optimizer, net), "the model is of type SGD"),
        ((net, torch.optim.SGD), "SGD is not a torch optimizer"),
        ((net, []), "no optimizer to watch"),
        ((net, optimizer, object()), "object is not a torch GradScaler"),
    ):
        with pytest.raises(UsageError, match=message):
            ampaudit.watch(*arguments)  # type: ignore[arg-type]
    with ampaudit.watch(net, optimizer) as monitor:
        with pytest.raises(UsageError, match=r"the loss has the shape \(2,\)"):
            monitor.loss(torch.ones(2))
        with pytest.raises(UsageError, match="step=-1"):
            monitor.loss(1.0, step=-1)
