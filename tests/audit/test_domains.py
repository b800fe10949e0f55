"""What a report says about the domain of an op is what torch computes."""

from __future__ import annotations

import pytest
import torch

from ampaudit.audit.checks.causes import _DOMAINS

# of each phrase, inputs that it describes, and others
EXAMPLES = {
    "negative": ([-0.5, -3.0], [0.5, 3.0]),
    "not between -1 and 1": ([-1.5, 1.5], [-0.5, 0.5]),
    "not between 0 and 1": ([-0.5, 1.5], [0.25, 0.75]),
    "below 1": ([0.5, -2.0], [1.0, 2.0]),
    "below -1": ([-1.5, -3.0], [-0.5, 2.0]),
}


@pytest.mark.parametrize("op", _DOMAINS)
def test_an_op_is_undefined_exactly_where_the_report_says(op: str) -> None:
    outside, inside = EXAMPLES[_DOMAINS[op]]
    function = getattr(torch, op) if op != "pow" else lambda x: torch.pow(x, 0.5)
    assert function(torch.tensor(outside)).isnan().all()
    assert function(torch.tensor(inside)).isfinite().all()
