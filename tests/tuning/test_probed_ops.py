"""Every differentiable op of PyTorch's own samples can be probed."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import ampaudit
from ampaudit.core.errors import AuditError
from tests.support.native import Calls, sample_calls

PARTS = 40
# scatter(reduce="multiply") has no derivative in PyTorch
WITHOUT_DERIVATIVE = frozenset({"scatter"})
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("part", range(PARTS))
def test_an_op_is_probed(part: int) -> None:
    refused = []
    for info in (each for each in op_db[part::PARTS] if each.supports_autograd):
        for call in sample_calls(info, 2, 1.0, None):
            try:
                ampaudit.scan(
                    Calls(call.function, call.kwargs).eval(),
                    tuple(call.args),
                    policy="half",
                    sensitivity=True,
                )
            except AuditError as error:
                if (
                    "an op of the model has no gradient" in error.args[0]
                    and info.name not in WITHOUT_DERIVATIVE
                ):
                    refused.append(f"{info.formatted_name}: {error.args[0]}")
    assert not refused, "\n".join(refused)


def test_a_rotary_embedding_of_older_code_is_probed() -> None:
    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(24, 24)
            self.register_buffer("inv_freq", 1 / (100 ** (torch.arange(0, 24, 2).float() / 24)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1]).type_as(
                self.inv_freq
            )  # whose gradient is none of inv_freq's
            angles = torch.einsum("i,j->ij", positions, self.inv_freq)
            both = torch.cat([angles, angles], dim=-1)[None]
            rotated: torch.Tensor = self.inner(x * both.cos() + x.flip(-1) * both.sin())
            return rotated

    for policy in ("half", "torch-cuda"):
        report = ampaudit.scan(Rotary(), (torch.randn(2, 8, 24),), policy=policy, sensitivity=True)
        assert "sensitivity" in report.sections
