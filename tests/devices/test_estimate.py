"""Work and time at best, against formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampaudit.devices.catalogue import device_named
from ampaudit.devices.estimate import OpCounter, roofline_seconds, total_work


def test_operations_are_counted_as_the_formula_says() -> None:
    weight, x = torch.randn(16, 32), torch.randn(8, 32)
    with OpCounter() as counter:
        torch.nn.functional.linear(x.half(), weight.half())
    work = total_work(counter.ops, tf32=False)
    assert work.flops == 2 * 8 * 16 * 32
    assert work.fast_share == 1.0
    assert work.cast_bytes == (8 * 32 + 16 * 32) * (4 + 2)
    assert work.bytes_moved == work.cast_bytes + 2 * (8 * 32 + 16 * 32 + 8 * 16)
    with OpCounter() as counter:
        torch.nn.functional.linear(x, weight)
    assert total_work(counter.ops, tf32=False).fast_share == 0.0
    assert total_work(counter.ops, tf32=True).fast_share == 1.0
    with OpCounter() as counter:
        _ = x > 0  # another dtype, and no conversion
    assert total_work(counter.ops, tf32=False).cast_bytes == 0


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_gradients_of_a_convolution_cost_what_it_costs(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 16, 3, padding=1, groups=groups, bias=False)
    x = torch.randn(2, 8, 10, 12, requires_grad=True)
    with OpCounter() as forward:
        y = layer(x)
    with OpCounter() as back:
        y.sum().backward()
    # every output is a sum over 3 x 3 places of the channels of its group; all but the borders
    assert total_work(forward.ops, tf32=False).flops == 2 * (2 * 10 * 12) * 9 * 8 * 16 // groups
    assert total_work(back.ops, tf32=False).flops == 2 * total_work(forward.ops, tf32=False).flops


def test_the_roofline_takes_the_longer_of_arithmetic_and_bytes() -> None:
    v100 = device_named("v100")
    big = torch.randn(512, 512, dtype=torch.float16)
    with OpCounter() as counter:
        big @ big
    seconds = roofline_seconds(counter.ops, v100, tf32=False)
    flops, moved = 2 * 512**3, 2 * 512 * 512 * 2  # the same factor twice is read once
    assert seconds == pytest.approx(max(flops / 125e12, moved / 900e9))
    with OpCounter() as counter:
        big + 1
    assert roofline_seconds(counter.ops, v100, tf32=False) == pytest.approx(2 * 512 * 512 * 2 / 900e9)
    assert roofline_seconds(counter.ops, device_named("cpu"), tf32=False) is None
