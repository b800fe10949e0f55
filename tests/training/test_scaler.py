"""Loss scalers against torch's own, and against what the other systems publish."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ampaudit
from ampaudit.core.errors import PolicyError, UsageError
from ampaudit.policy.schema import LossScale
from ampaudit.training.prepare import LossScaler, ScaleState, next_scale_state

# the constants that each system publishes: start, factor, window, hysteresis, least, largest
PUBLISHED = {
    "torch": (65536.0, 2.0, 2000, 1, None, None),
    "apex": (65536.0, 2.0, 2000, 1, None, 2.0**24),
    "mxnet": (65536.0, 2.0, 2000, 1, None, 2.0**24),
    "deepspeed": (65536.0, 2.0, 1000, 2, 1.0, None),
    "megatron-core": (2.0**32, 2.0, 1000, 2, 1.0, None),
    "tensorflow": (32768.0, 2.0, 2000, 1, 1.0, None),
    "paddle": (65536.0, 2.0, 2000, 1, None, None),
}


def pattern(steps: int, rate: float, seed: int = 0) -> list[bool]:
    chance = random.Random(seed)
    return [chance.random() < rate for _ in range(steps)]


def replay(scaler: torch.amp.GradScaler, overflows: list[bool]) -> list[float]:
    """The scale after each step of a real optimizer whose gradients overflow as told."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for overflow in overflows:
        weight.grad = torch.tensor([float("inf") if overflow else 1.0])
        scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_the_torch_profile_is_torchs_scaler() -> None:
    overflows = pattern(3000, 0.002) + pattern(50, 0.5, 1) + [False] * 2100
    assert replay(ampaudit.scaler("torch", "cpu"), overflows) == replay(
        torch.amp.GradScaler("cpu"), overflows
    )


@pytest.mark.parametrize(("growth", "backoff"), [(1.7, 0.3), (1.1, 0.9)])
def test_scales_that_are_no_powers_of_two_are_torchs_to_the_last_bit(growth: float, backoff: float) -> None:
    """Torch rounds the scale to float32 after each change."""
    scalers = ampaudit.scaler("torch", "cpu"), torch.amp.GradScaler("cpu")
    for scaler in scalers:
        scaler.set_growth_factor(growth), scaler.set_backoff_factor(backoff), scaler.set_growth_interval(3)
    ours, theirs = (replay(scaler, pattern(200, 0.2)) for scaler in scalers)
    assert ours == theirs
    assert scalers[0].state.scale == ours[-1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recorded_pattern_against_published_constants(name: str) -> None:
    """Counted from the steps since the last overflow, as DeepSpeed writes it; the others do the same."""
    start, factor, window, lives, least, largest = PUBLISHED[name]
    overflows = pattern(4000, 0.0015, 7) + [True] * 3 + [False] * window + [True, False, True] + [False] * 50
    scale, left, last, expected = start, lives, -1, []
    for step, overflow in enumerate(overflows):
        if overflow:
            last = step
            if left == 1:
                scale = max(scale / factor, least or 0.0)
            else:
                left -= 1
        elif (step - last) % window == 0:
            left = lives
            scale = min(scale * factor, largest or float("inf"))
        expected.append(scale)
    assert replay(ampaudit.scaler(name, "cpu"), overflows) == expected
    assert len(set(expected)) > 3


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_bounds_hold_and_scales_are_powers(overflows: list[bool], lives: int, interval: int) -> None:
    rule = LossScale(init=16.0, interval=interval, hysteresis=lives, min=1.0, max=256.0)
    state = ScaleState(16.0, 0, lives)
    for overflow in overflows:
        after = next_scale_state(state, rule, overflow)
        assert 1.0 <= after.scale <= 256.0
        assert after.scale <= state.scale if overflow else after.scale >= state.scale
        assert after.good < interval
        state = after


def test_a_scale_that_would_not_be_finite_stays() -> None:
    rule = LossScale(init=2.0**127, interval=1, max="finite")
    assert next_scale_state(ScaleState(2.0**127, 0, 1), rule, False).scale == 2.0**127


def test_static_and_none() -> None:
    assert set(replay(ampaudit.scaler("one", "cpu"), [True, False, True])) == {1.0}
    none = ampaudit.scaler("none", "cpu")
    assert not none.is_enabled()
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    none.scale(weight.sum()).backward()
    none.step(optimizer)
    none.update()
    assert weight.item() == 0.0


@pytest.mark.parametrize("name", ["torch", "deepspeed", "megatron-core"])
def test_a_scaler_goes_on_where_it_was_saved(name: str) -> None:
    overflows = pattern(400, 0.01, 3)
    whole = replay(ampaudit.scaler(name, "cpu"), overflows)
    first = ampaudit.scaler(name, "cpu")
    replay(first, overflows[:200])
    second = ampaudit.scaler(name, "cpu")
    second.load_state_dict(first.state_dict())
    assert replay(second, overflows[200:]) == whole[200:]


def test_a_plain_scalers_checkpoint_can_be_loaded() -> None:
    plain = torch.amp.GradScaler("cpu")
    overflows = [True, False, False]
    replay(plain, overflows)
    ours = ampaudit.scaler("torch", "cpu")
    ours.load_state_dict(plain.state_dict())
    assert ours.get_scale() == 32768.0
    assert ours.state.good == 2


def test_mistakes_are_one_line() -> None:
    with pytest.raises(PolicyError, match="unknown loss-scale profile 'deepsped'"):
        ampaudit.scaler("deepsped")
    with pytest.raises(UsageError, match=r"update.. was called before"):
        LossScaler(LossScale(), "cpu").update()
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = ampaudit.scaler("torch", "cpu")
    ours.scale(model(torch.ones(1, 2).half()).float().sum()).backward()
    with pytest.raises(UsageError, match="float16 parameters"):
        ours.step(optimizer)


def test_a_group_without_processes_is_one_line() -> None:
    with pytest.raises(UsageError, match="this process is in none") as caught:
        replay(ampaudit.scaler("torch", "cpu", group=True), [False])
    assert "init_process_group" in (caught.value.hint or "")


def both() -> tuple[torch.amp.GradScaler, LossScaler]:
    return torch.amp.GradScaler("cpu"), ampaudit.scaler("torch", "cpu")


def visible(scaler: torch.amp.GradScaler) -> tuple[object, ...]:
    """All that torch's public methods say about a scaler."""
    factors = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    state = {k: v for k, v in scaler.state_dict().items() if k != "patience"}
    return (*factors, scaler.get_scale(), scaler._get_growth_tracker(), scaler.is_enabled(), state)


# what is done to both scalers between runs of steps
ACTIONS: dict[str, Callable[[torch.amp.GradScaler], object]] = {
    "interval": lambda s: s.set_growth_interval(3),
    "growth": lambda s: s.set_growth_factor(4.0),
    "backoff": lambda s: s.set_backoff_factor(0.25),
    "scale": lambda s: s.update(1024.0),
    "scale as a tensor": lambda s: s.update(torch.tensor(512.0)),
    "loads": lambda s: s.load_state_dict(
        {
            "scale": 8.0,
            "growth_factor": 3.0,
            "backoff_factor": 0.5,
            "growth_interval": 2,
            "_growth_tracker": 1,
        }
    ),
    "its own state": lambda s: s.load_state_dict(s.state_dict()),
}


@given(st.lists(st.sampled_from([*ACTIONS, "overflow", "good", "good", "pickle"]), max_size=25))
@settings(max_examples=60, deadline=None)
def test_every_public_method_does_what_torchs_does(actions: list[str]) -> None:
    scalers: list[torch.amp.GradScaler] = list(both())
    for scaler in scalers:
        replay(scaler, [False])  # torch refuses update before the first scale()
    for action in actions:
        if action == "pickle":
            scalers = [pickle.loads(pickle.dumps(scaler)) for scaler in scalers]
            for scaler in scalers:
                scaler.scale(torch.ones(1))
        elif action in ACTIONS:
            for scaler in scalers:
                ACTIONS[action](scaler)
        else:
            for scaler in scalers:
                replay(scaler, [action == "overflow"])
        assert visible(scalers[1]) == visible(scalers[0])


def test_a_profiles_constants_are_what_torchs_methods_say() -> None:
    scaler = ampaudit.scaler("deepspeed", "cpu")
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)
    assert scaler.get_growth_interval() == scaler.state_dict()["growth_interval"] == 1000


def test_a_disabled_scaler_is_torchs() -> None:
    ours, plain = LossScaler(LossScale(), "cpu", enabled=False), torch.amp.GradScaler("cpu", enabled=False)
    for scaler in (ours, plain):
        assert scaler.get_scale() == 1.0
        assert scaler.state_dict() == {}
        scaler.load_state_dict({})
        scaler.update()
        assert pickle.loads(pickle.dumps(scaler)).get_scale() == 1.0
        assert float(scaler.scale(torch.ones(1))) == 1.0


def test_an_empty_state_is_refused_as_torch_does() -> None:
    for scaler in both():
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            scaler.load_state_dict({})
