"""Along a path, the reference is compared with the model, which is called and never changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.core.session import Session
from tests.support.wrap import Wrap


def wrap(function: Callable[..., torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Wrap(function, a=nn.Linear(8, 8)).eval()


def writes_to_a_weight(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.a.weight.mul_(2)
    return m.a(x) * 2 if m.a.weight.sum() > 0 else m.a(x)


def own_autocast(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = m.a(x)
        if made.sum() > -100:
            made = made * 2
    return made.float()


def own_casts(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scaled = x.half() * 3
    return m.a(x) + scaled.to(x.dtype) if scaled.sum() > 1 else m.a(x)


def lists(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    both = [x.clone(), x * 2]
    torch._foreach_mul_(both, 2.0)
    return m.a(both[0]) if both[1].sum() > 0 else m.a(both[1])


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.steps = torch.arange(8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x + self.steps) if self.steps.double().sum().item() > 1 else self.a(x)


def test_weights_that_a_model_writes_to_are_not_changed() -> None:
    model = wrap(writes_to_a_weight)
    before = model.a.weight.detach().clone()
    report = scan(model, batches=[(torch.ones(2, 8),), (torch.rand(2, 8),)], policy="half")
    assert report.path is not None
    assert torch.equal(model.a.weight, before)


@pytest.mark.parametrize("function", [own_autocast, own_casts, lists])
def test_a_model_that_rounds_by_itself_or_writes_to_lists_is_audited(
    function: Callable[..., torch.Tensor],
) -> None:
    report = scan(wrap(function), torch.rand(2, 8), policy="half")
    assert report.path is not None
    assert [finding.code for finding in report.findings if finding.severity == "error"] == []


def test_a_constant_in_float64_is_no_weight_in_16_bits() -> None:
    assert scan(Table().eval(), torch.rand(2, 8), policy="half").path is not None


def unused_draw(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    kept = x.reshape(-1)[torch.rand(16) > 0.5]
    return m.a(x) + (kept + torch.ones(len(kept.tolist()))).sum()


def test_random_numbers_that_nothing_uses_are_drawn_in_the_run_as_well() -> None:
    kept: dict[int, torch.Tensor] = {}
    x = torch.rand(2, 8)
    for seed in range(3):
        scan(
            wrap(unused_draw),
            x,
            policy="half",
            seed=seed,
            session=Session(
                keep_outputs=lambda number, found: kept.__setitem__(number, next(iter(found.values()))[0])
            ),
        )
        model = wrap(unused_draw)
        torch.manual_seed(seed)
        assert torch.allclose(kept[0], model(x), atol=1e-5)
