# style of: Lightning-AI/pytorch-lightning:tests/tests_pytorch/plugins/precision/test_amp.py
# torch: 2.3+
from unittest import mock

import pytest
import torch
from torch import nn


def amp_update(loss, model, optimizer, scaler, max_norm=None):
    scaler.scale(loss).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


@pytest.fixture
def parts():
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def passthrough_scaler():
    scaler = mock.Mock(spec=torch.amp.GradScaler)
    scaler.scale.side_effect = lambda value: value
    return scaler


def test_order_of_calls(parts):
    model, optimizer = parts
    scaler = passthrough_scaler()
    loss = model(torch.ones(2, 4)).sum()
    amp_update(loss, model, optimizer, scaler, max_norm=1.0)
    assert [c[0] for c in scaler.method_calls] == ["scale", "unscale_", "step", "update"]
    scaler.step.assert_called_once_with(optimizer)


def test_no_unscale_without_clipping(parts):
    model, optimizer = parts
    scaler = passthrough_scaler()
    amp_update(model(torch.ones(2, 4)).sum(), model, optimizer, scaler)
    scaler.unscale_.assert_not_called()


def test_unscale_twice_is_an_error(parts):
    model, optimizer = parts
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_non_finite_gradient_skips_the_step(parts):
    model, optimizer = parts
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.full((2, 4), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_state_round_trip():
    first = torch.amp.GradScaler("cpu", init_scale=128.0)
    second = torch.amp.GradScaler("cpu")
    second.load_state_dict(first.state_dict())
    assert second.get_scale() == 128.0
