"""Feed-forward layers and residual streams whose values grow out of range.

Under autocast a float32 input keeps the residual stream in float32: those cases break in ``half`` alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models.case import Built, Net, failure, linear


@failure("huggingface/transformers#5651", "wo", "AMP101", "half16 cuda16")
def t5_output_projection(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.last(x + m.wo(torch.relu(m.wi(m.norm(x)))))

    gain = 1500.0 if bad else 1.0
    layers = {"norm": nn.LayerNorm(64), "wi": linear(64, 256, gain), "wo": linear(256, 64, 60 if bad else 1)}
    return Net(forward, **layers, last=nn.LayerNorm(64)), (torch.randn(2, 8, 64),)


@failure("huggingface/transformers#9295", "", "AMP101", "half16 cuda16")
def t5_gated_feed_forward(bad: bool) -> Built:
    """The product of both branches leaves the range before the output projection."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(m.gate(m.norm(x)), approximate="tanh") * m.up(m.norm(x))
        return m.last(m.wo(hidden))

    gain = 900.0 if bad else 1.0
    layers = {"norm": nn.LayerNorm(64), "gate": linear(64, 128, gain), "up": linear(64, 128, gain)}
    down = linear(128, 64, 1e-3 if bad else 1.0)
    return Net(forward, **layers, wo=down, last=nn.LayerNorm(64)), (torch.randn(2, 8, 64),)


@failure("huggingface/transformers#19229", "", "AMP109", "half16", wrong="cuda16 halfbf cudabf")
def longt5_residual_add(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        for block in (m.first, m.second, m.third):
            x = x + block(m.norm(x))
        return m.norm(x)

    shift = 3e4 if bad else 3.0
    blocks = {name: linear(32, 32, shift=shift) for name in ("first", "second", "third")}
    return Net(forward, norm=nn.LayerNorm(32), **blocks), (torch.randn(2, 8, 32),)


@failure("huggingface/transformers#12225", "", "AMP109 AMP101", "half16", wrong="cuda16 halfbf cudabf")
def pegasus_second_projection(bad: bool) -> Built:
    """fc2 gives 6.06e4, in range; the residual add after it does not."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        x = x + m.attention(m.norm(x))
        return m.norm(x + m.fc2(torch.relu(m.fc1(m.norm(x)))))

    layers = {"attention": linear(32, 32, shift=9e3 if bad else 1.0), "fc1": linear(32, 64)}
    fc2 = linear(64, 32, shift=6e4 if bad else 1.0)
    return Net(forward, norm=nn.LayerNorm(32), **layers, fc2=fc2), (torch.randn(2, 8, 32),)


@failure("huggingface/transformers#36822", "", "AMP109", "half16")
def gemma3_residual_stream(bad: bool) -> Built:
    """Norms after each block have large weights, so that the stream grows with depth."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        for index in range(6):
            x = x + m.post(torch.tanh(m.inner(F.rms_norm(x.float(), (32,)).to(x.dtype))) + 0.01 * index)
        return F.rms_norm(x.float(), (32,)).to(x.dtype)

    post = nn.LayerNorm(32)
    nn.init.constant_(post.weight, 500.0 if bad else 1.0)
    nn.init.constant_(post.bias, 2e4 if bad else 0.0)
    return Net(forward, inner=linear(32, 32), post=post), (torch.randn(2, 8, 32),)


@failure(
    "Swin Transformer V2, Liu et al. 2022, figure 2: amplitudes grow with depth",
    "",
    "AMP109",
    "half16",
    wrong="cuda16 halfbf cudabf",
)
def swin_deep_stages(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x + m.branch(m.norm(x))
        return m.norm(x)

    branch = linear(32, 32, shift=9e3 if bad else 0.5)
    return Net(forward, norm=nn.LayerNorm(32), branch=branch), (torch.randn(2, 8, 32),)


@failure("invoke-ai/InvokeAI#4454", "conv_out", "AMP101", "half16 cuda16")
def sdxl_vae_decoder(bad: bool) -> Built:
    """Activations of the decoder pass 1e5; the image is black."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.conv_out(F.silu(m.conv_in(x)))
        return m.norm(hidden)

    conv_in, conv_out = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    with torch.no_grad():
        conv_in.weight.mul_(300.0 if bad else 1.0)
        conv_out.weight.mul_(1000.0 if bad else 1.0)
    return Net(forward, conv_in=conv_in, conv_out=conv_out, norm=nn.GroupNorm(4, 16)), (
        torch.randn(1, 4, 8, 8),
    )


@failure("Peterande/D-FINE#199: the authors added clamps", "", "AMP111", "half16 cuda16")
def d_fine_clamped_decoder(bad: bool) -> Built:
    """A limit far below what FP32 gives hides the overflow before it."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(m.inner(x) * m.inner(x) / 1e6)

    return Net(forward, inner=linear(32, 32, shift=500.0 if bad else 2.0)), (torch.randn(4, 32),)
