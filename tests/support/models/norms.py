"""Norms and variances written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models.case import Built, Net, failure, linear


def _hidden(bad: bool, shift: float) -> nn.Linear:
    return linear(32, 32, shift=shift if bad else 0.0)


@failure("microsoft/onnxruntime#29043", "", "AMP106", "half16")
def simplified_layer_norm(bad: bool) -> Built:
    """The sum of squares leaves the range although each square fits."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.inner(x)
        return hidden * torch.rsqrt(hidden.square().sum(-1, keepdim=True) / 32 + 1e-4)

    return Net(forward, inner=_hidden(bad, 100.0)), (torch.randn(4, 32),)


@failure(
    "T5LayerNorm and LlamaRMSNorm upcast for this reason: Transformers, modeling_llama.py",
    "",
    "AMP106",
    "half16",
)
def rms_norm_in_half(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.inner(x)
        wide = hidden if bad else hidden.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return Net(forward, inner=linear(32, 32, gain=100.0, shift=400.0)), (torch.randn(4, 32),)


@failure("CogView, Ding et al. 2021, section 2.4: LayerNorm(x / max(x))", "", "AMP106", "half16 cuda16")
def cogview_layer_norm(bad: bool) -> Built:
    """Eager autocast leaves x * x in 16 bits."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.inner(x)
        hidden = hidden if bad else hidden / hidden.abs().amax(-1, keepdim=True)
        centred = hidden - hidden.mean(-1, keepdim=True)
        return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-4).sqrt()

    return Net(forward, inner=linear(32, 32, gain=1000.0 if bad else 1.0)), (torch.randn(4, 32),)


@failure("microsoft/onnxconverter-common#299", "", "AMP105", "half16")
def exported_layer_norm_mean(bad: bool) -> Built:
    """ReduceMean as a runtime does it: the sum first."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.inner(x)
        mean = hidden.sum(1, keepdim=True) / 4096 if bad else hidden.mean(1, keepdim=True)
        return hidden - mean

    return Net(forward, inner=linear(32, 32, gain=30.0, shift=20.0)), (torch.randn(1, 4096, 32),)


@failure("sgl-project/sglang#27540", "", "AMP205 AMP208 AMP207", "halfbf", wrong="half16 cuda16 cudabf")
def variance_reduced_in_bfloat16(bad: bool) -> Built:
    """E[x^2] - E[x]^2 of values with a mean: most of it is rounding."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.inner(x)
        wide = hidden if bad else hidden - hidden.mean(-1, keepdim=True)
        variance = wide.square().mean(-1, keepdim=True) - wide.mean(-1, keepdim=True).square()
        return variance

    return Net(forward, inner=linear(32, 32, shift=12.0)), (torch.randn(64, 32),)


@failure("Chan, Golub and LeVeque 1983: the textbook algorithm", "", "AMP205", "half16 cuda16 halfbf cudabf")
def negative_variance(bad: bool) -> Built:
    """A variance that is negative by rounding, under a square root."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.inner(x)
        if not bad:
            return torch.sqrt((hidden - hidden.mean(-1, keepdim=True)).square().mean(-1) + 1e-3)
        return torch.sqrt(hidden.square().mean(-1) - hidden.mean(-1).square())

    return Net(forward, inner=linear(32, 32, gain=0.5, shift=60.0 if bad else 0.0)), (torch.randn(256, 32),)


@failure(
    "StyleGAN2-ADA, Karras et al. 2020: modulated_conv2d pre-normalizes for float16", "", "AMP106", "half16"
)
def style_demodulation(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        styles = m.affine(x)
        styles = styles if bad else styles / styles.abs().amax(-1, keepdim=True)
        weight = m.weight[None] * styles[:, None, :]
        return torch.rsqrt(weight.square().sum(-1) + 1e-4)

    return Net(forward, affine=linear(32, 32, shift=300.0), weight=torch.randn(16, 32) / 3), (
        torch.randn(4, 32),
    )


@failure("PyTorch, F.normalize: eps is 1e-12 by default", "", "AMP202", "half16")
def normalize_a_zero_vector(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(m.inner(x))
        return F.normalize(hidden, dim=-1, eps=1e-12 if bad else 1e-3)

    x = torch.randn(4, 32)
    x[0] = 0.0
    inner = linear(32, 32)
    nn.init.zeros_(inner.bias)
    return Net(forward, inner=inner), (x,)
