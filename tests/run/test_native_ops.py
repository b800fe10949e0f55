"""A sample of benchmarks/native_ops.py: torch's own inputs for an op, natively and under audit."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.support.native import Comparison, compared, difference, sample_calls

# one of each kind of kernel: elementwise, reduction, product, norm, loss, pooling, indexing, composite
NAMES = """
    abs add addbmm addcdiv addmm amax atan2 baddbmm bmm cdist clamp cross cumsum diff dist einsum erf exp
    floor_divide gather index_add index_put index_select ldexp lerp linalg.cross linalg.multi_dot
    linalg.vector_norm log_softmax logaddexp logcumsumexp logsumexp masked_fill matmul mean mvlgamma
    nan_to_num nextafter nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.bilinear
    nn.functional.binary_cross_entropy_with_logits nn.functional.conv2d nn.functional.gelu
    nn.functional.group_norm nn.functional.huber_loss nn.functional.kl_div nn.functional.linear
    nn.functional.mse_loss nn.functional.poisson_nll_loss nn.functional.smooth_l1_loss
    nn.functional.soft_margin_loss nn.functional.softplus pow reciprocal softmax sort std sum tensordot
    trapezoid unfold var where
""".split()
OPS = {info.formatted_name: info for info in op_db if info.name in NAMES}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_the_sample_is_found() -> None:
    assert {info.name for info in OPS.values()} == set(NAMES)


@pytest.mark.parametrize("scale", [1.0, 200.0], ids=["usual", "large"])
@pytest.mark.parametrize("name", OPS)
def test_float16_is_what_torch_gives(name: str, scale: float) -> None:
    """Dtype, verdict, and values within two units of eps times the peak."""
    for call in sample_calls(OPS[name], 2, scale, torch.float16):
        assert compared(call, torch.float16, "half").kind in ("same", "native raises")


@pytest.mark.parametrize("name", OPS)
def test_torch_cpu_is_what_real_autocast_gives(name: str) -> None:
    for call in sample_calls(OPS[name], 2, 1.0, None):
        assert compared(call, torch.bfloat16, "torch-cpu").kind in ("same", "native raises")


def test_a_difference_is_seen() -> None:
    """The comparison itself, on pairs that are told apart."""
    ones = torch.ones(2).half()
    assert difference(ones, ones.float(), torch.float16, torch.float16) == Comparison("same")
    assert difference(ones, ones.float() * 1.01, torch.float16, torch.float16).kind == "ulps"
    assert difference(ones, ones.float() * torch.inf, torch.float16, torch.float16).kind == "verdict"
    assert difference(ones, ones.float(), torch.float32, torch.float16).kind == "dtype"
    assert difference(ones, ones.float()[:1], torch.float16, torch.float16).kind == "shape"
