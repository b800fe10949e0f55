"""What the rules about dtypes say, against torch itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from ampaudit.linter.flow.torch_names import (
    AUTOCAST_FLOAT32,
    BFLOAT16_ROUNDS_TO_ONE,
    FLOAT16_ROUNDS_TO_ONE,
    KEEPS_DTYPE,
    MAKES_TENSORS,
    WRITES_SAME_DTYPE,
)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float16, FLOAT16_ROUNDS_TO_ONE), (torch.bfloat16, BFLOAT16_ROUNDS_TO_ONE)],
)
def test_the_largest_eps_that_1_minus_it_rounds_to_1(dtype: torch.dtype, limit: float) -> None:
    """AMP861; the tie itself rounds to the even neighbor, which is 1."""
    assert torch.tensor(1 - limit, dtype=torch.float64).to(dtype) == 1
    assert torch.tensor(1 - 1.01 * limit, dtype=torch.float64).to(dtype) < 1
    guarded = torch.tensor([0.0, 1.0], dtype=dtype).clamp(max=1 - 0.5 * limit)
    assert torch.log1p(-guarded).isinf().tolist() == [False, True]


def test_neighboring_positions_become_equal() -> None:
    """AMP869: 8 significant bits end at 256, 11 at 2048."""
    for dtype, last in ((torch.bfloat16, 256), (torch.float16, 2048)):
        positions = torch.arange(last + 2).to(dtype)
        assert len(positions[: last + 1].unique()) == last + 1
        assert positions[last] == positions[last + 1]
    positions, rates = torch.arange(1000.0), torch.ones(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        angles = positions[:, None] @ rates[None]
        outer = torch.einsum("i,j->ij", positions, rates)  # multiplies, as nothing is summed
    assert angles.dtype == torch.bfloat16
    assert len(angles.unique()) < 600
    assert len(outer.unique()) == 1000


@pytest.mark.parametrize(("rate", "share"), [(1e-5, 0.8), (1e-4, 0.25)])
def test_small_steps_of_adam_are_rounded_away(rate: float, share: float) -> None:
    """AMP870: the share of the weights of a layer that a first step leaves as they are."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 512).bfloat16()  # weights up to 1/22.6
    before = layer.weight.detach().clone()
    optimizer = torch.optim.Adam(layer.parameters(), lr=rate)
    layer(torch.randn(8, 512, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert (layer.weight == before).float().mean() > share
    assert (layer.weight == before)[before.abs() > 0.04].all()


def test_log_probabilities_of_a_16_bit_model_are_coarse() -> None:
    """AMP872: a log-probability of about -10 is a multiple of 1/16 in bfloat16."""
    logits = torch.randn(64, 30_000).bfloat16()
    coarse = torch.log_softmax(logits, -1)
    assert coarse.dtype == torch.bfloat16
    of_ten = coarse[(coarse > -16) & (coarse < -8)].float()
    assert ((of_ten * 16) % 1 == 0).all()
    assert (coarse.float() - torch.log_softmax(logits.float(), -1)).abs().max() > 1 / 64


def test_sums_outside_autocast_overflow_and_totals_stand_still() -> None:
    """AMP873."""
    probabilities = torch.full((2, 65, 1009), 0.999, dtype=torch.float16)
    assert probabilities.sum().isinf()
    assert probabilities.float().sum().isfinite()
    for dtype, last in ((torch.bfloat16, 256), (torch.float16, 2048)):
        total = torch.zeros((), dtype=dtype)
        for _ in range(last + 100):
            total += 1
        assert total == last


@pytest.mark.parametrize("name", sorted(WRITES_SAME_DTYPE))
def test_what_writes_in_place_converts_nothing(name: str) -> None:
    """AMP874."""
    source, index = torch.ones(2, dtype=torch.float16), torch.tensor([0, 1])
    arguments: dict[str, tuple[Any, ...]] = {
        "index_put_": ((index,), source),
        "masked_scatter_": (torch.tensor([True, True, False]), source),
        "scatter_reduce_": (0, index, source, "sum"),
    }
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        getattr(torch.zeros(3), name)(*arguments.get(name, (0, index, source)))
    for selected in (index, torch.tensor([True, True, False])):
        with pytest.raises(RuntimeError, match="dtypes match"):
            torch.zeros(3)[selected] = source
    torch.zeros(3)[:2] = source  # a slice copies, and converts


@pytest.mark.parametrize("name", sorted(MAKES_TENSORS))
def test_the_dtype_of_a_new_tensor(name: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "full": ((2,), 1),
        "linspace": (0, 1, 3),
        "logspace": (0, 1, 3),
        "arange": (3,),
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = getattr(torch, name)(*arguments.get(name, (2,)))
    assert (made.dtype == torch.float32) == MAKES_TENSORS[name]


def test_numpy_and_fft_refuse_bfloat16() -> None:
    """AMP846."""
    values = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="BFloat16"):
        values.numpy()
    with pytest.raises(RuntimeError, match="BFloat16"):
        torch.fft.rfft(values)


def _called(name: str, value: torch.Tensor) -> torch.Tensor | None:
    """The result of a function of torch for one argument; ``None`` if it takes more, or other ones."""
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an implicit dimension
            found = None if function is None else function(value)
    except (TypeError, RuntimeError, ValueError):
        return None
    return found if isinstance(found, torch.Tensor) and found.is_floating_point() else None


def test_ops_that_keep_the_dtype_do() -> None:
    value, tried = torch.rand(4, 4, dtype=torch.float16) + 0.5, 0
    for name in sorted(KEEPS_DTYPE):
        found = _called(name, value)
        if found is not None:
            assert found.dtype == torch.float16, name
            tried += 1
    assert tried > 20


def test_autocast_on_cuda_computes_these_in_float32() -> None:
    """The dispatcher of a CUDA autocast, asked with fake tensors, as there may be no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtypes: dict[str, torch.dtype] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        value = torch.empty(4, 4, dtype=torch.float16, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            for name in sorted(AUTOCAST_FLOAT32):
                found = _called(name, value)
                if found is not None:
                    dtypes[name] = found.dtype
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert len(dtypes) > 15
    wrong = {name: dtype for name, dtype in dtypes.items() if dtype != torch.float32}
    assert not wrong
