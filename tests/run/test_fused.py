"""The kernel for CUDA against torch's own ops: in Triton's interpreter, and on a device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from ampaudit.run import measure
from ampaudit.run.measure import measure_any, measure_on_device

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(routine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], device: str) -> None:
    """Compare at sizes about those of a block and of all programs together, with inf and NaN anywhere."""
    random = torch.Generator().manual_seed(0)
    for elements in (1, 1025, 600_001):
        for dtype in DTYPES if elements < 2000 else DTYPES[:1]:
            reference = torch.randn(elements, generator=random) * 1000
            value = reference.to(dtype)
            for bad in (math.inf, -math.inf, math.nan):
                for vector in (reference, value):
                    vector[torch.randint(elements, (3,), generator=random)] = bad
            reference, value = reference.to(device), value.to(device)
            found = routine(reference, value)
            torch.testing.assert_close(found, measure_any(reference, value.float()), rtol=1e-13, atol=0)
            assert torch.equal(found, routine(reference, value)), "another order of the sum"


def test_kernel_equals_torch_in_the_interpreter() -> None:
    # the interpreter of an earlier one fails with today's NumPy
    pytest.importorskip("triton", minversion="3.9", reason="`make kernel` installs Triton")
    code = "from ampaudit.run.fused import measure_fused; import tests.run.test_fused as t"
    subprocess.run(
        [sys.executable, "-c", f"{code}; t.check(measure_fused, 'cpu')"],
        check=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )


@pytest.mark.gpu
def test_kernel_equals_torch_on_a_device() -> None:
    assert measure._fused(torch.device("cuda", 0)) is not None
    check(measure_on_device, "cuda")


@pytest.mark.parametrize("missing", [True, False])
def test_without_triton_or_a_device_torch_measures(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "ampaudit.run.fused", None)
    assert measure._fused.__wrapped__(torch.device("cpu")) is None
    check(measure_on_device, "cpu")
