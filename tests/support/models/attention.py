"""Attention: scores, masks, positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models.case import Built, Net, failure, linear


def _eye(width: int, gain: float) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width) * gain)
    return layer


def _scores(bad: bool, scaled: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        q, k = m.q(x), m.k(x)
        if not bad:
            return torch.softmax((q * 64**-0.5) @ k.transpose(1, 2), -1) @ m.v(x)
        scores = torch.matmul(q, k.transpose(1, 2))
        return torch.softmax(scores / 8 if scaled else scores, -1) @ m.v(x)

    gain = 320.0 if bad else 20.0
    return Net(forward, q=_eye(64, gain), k=_eye(64, gain), v=_eye(64, 1.0)), (torch.eye(8, 64)[None],)


@failure("huggingface/transformers#11076", "", "AMP108", "half16 cuda16")
def gpt_neo_unscaled_scores(bad: bool) -> Built:
    return _scores(bad, scaled=False)


@failure("GLM-130B, Zeng et al. 2022, section 2.2: scores scaled too late", "", "AMP108", "half16 cuda16")
def glm_late_scaling(bad: bool) -> Built:
    return _scores(bad, scaled=True)


def _masked(bad: bool, fill: float) -> Built:
    """Row 0 is padding: all of it is masked."""

    def forward(m: Net, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        scores = m.q(x) @ m.k(x).transpose(1, 2) * 0.25
        mask = (1.0 - keep.to(scores.dtype)) * (fill if bad else torch.finfo(scores.dtype).min)
        return torch.softmax(scores + mask, -1) @ m.v(x)

    layers = {name: linear(16, 16) for name in ("q", "k", "v")}
    keep = torch.ones(1, 8, 8, dtype=torch.long)
    keep[0, 0, 0 if not bad else slice(None)] = 0
    return Net(forward, **layers), (torch.randn(1, 8, 16), keep)


@failure("huggingface/transformers#17437", "", "AMP113", "half16 cuda16 halfbf cudabf")
def opt_minimum_mask(bad: bool) -> Built:
    """float32's minimum is beyond bfloat16, too: it rounds to -inf."""

    return _masked(bad, torch.finfo(torch.float32).min)


@failure("NVIDIA/apex#1052", "", "AMP113", "half16 cuda16")
def mask_of_minus_1e9(bad: bool) -> Built:
    return _masked(bad, -1e9)


@failure("NVIDIA/apex#1052, with the scores multiplied afterwards", "", "AMP301", "half16 cuda16")
def mask_used_in_arithmetic(bad: bool) -> Built:
    """A mask that is in range for a softmax is not for a product."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        penalty = torch.zeros(16).index_fill(0, torch.tensor([3]), 1e9 if bad else 1e2)
        return torch.sigmoid(m.inner(x)) * penalty.to(m.inner(x).dtype)

    return Net(forward, inner=linear(16, 16)), (torch.randn(4, 16),)


@failure(
    "Wang et al. 2024, 'When Precision Meets Position: BFloat16 Breaks Down RoPE'",
    "",
    "AMP206",
    "half16 halfbf",
)
def rotary_positions(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype if bad else torch.float32
        angles = torch.arange(4096).to(dtype)[:, None] * m.frequencies.to(dtype)
        return x * torch.cos(angles).to(x.dtype)

    frequencies = 1e4 ** -(torch.arange(8) / 8)
    if not bad:  # a float16 buffer would bring the error back
        return Net(lambda m, x: forward_exact(x), inner=linear(8, 8)), (torch.randn(1, 4096, 8),)
    return Net(forward, frequencies=frequencies), (torch.randn(1, 4096, 8),)


def forward_exact(x: torch.Tensor) -> torch.Tensor:
    frequencies = 1e4 ** -(torch.arange(8).float() / 8)
    return x * torch.cos(torch.arange(4096).float()[:, None] * frequencies).to(x.dtype)


@failure(
    "Diffusers, models/embeddings.py: get_timestep_embedding computes in float32", "", "AMP206", "halfbf"
)
def diffusion_timesteps(bad: bool) -> Built:
    """t = 999 of 1000 steps: bfloat16 knows 1000 and 996."""

    def forward(m: Net, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype if bad else torch.float32
        angles = steps.to(dtype)[:, None] * 1e4 ** -(torch.arange(8).to(dtype) / 8)
        return m.inner(x) + torch.cat([torch.cos(angles), torch.sin(angles)], -1).to(x.dtype)

    return Net(forward, inner=linear(16, 16)), (torch.randn(4, 16), torch.tensor([999, 777, 501, 3]))


@failure(
    "EfficientViT, Cai et al. 2022: its linear attention runs in float32",
    "",
    "AMP105",
    "half16 cuda16",
    wrong="halfbf cudabf",
)
def linear_attention(bad: bool) -> Built:
    """k^T v adds up over all tokens."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.relu(m.q(x)), torch.relu(m.k(x)), torch.relu(m.v(x))
        scale = 1.0 if bad else 1.0 / x.shape[1]
        return F.layer_norm(q @ ((k * scale).transpose(1, 2) @ v), (16,))

    shift = 8.0 if bad else 1.0
    return Net(forward, **{name: linear(16, 16, shift=shift) for name in ("q", "k", "v")}), (
        torch.randn(1, 2048, 16),
    )
