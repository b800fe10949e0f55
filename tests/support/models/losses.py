"""Losses, probabilities and exponentials."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models.case import Built, Net, failure, linear


@failure(
    "PyTorch, Automatic Mixed Precision: prefer binary_cross_entropy_with_logits",
    "",
    "AMP601",
    "cuda16 cudabf",
)
def cross_entropy_on_probabilities(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        target = (x > 0).float()
        if bad:
            return F.binary_cross_entropy(torch.sigmoid(m.inner(x)).float(), target.float())
        return F.binary_cross_entropy_with_logits(m.inner(x).float(), target)

    return Net(forward, inner=linear(16, 16)), (torch.randn(4, 16),)


@failure("RetinaNet's focal loss by hand, Lin et al. 2017", "", "AMP204", "half16 cuda16 halfbf cudabf")
def focal_loss(bad: bool) -> Built:
    """A confident negative: 1 - p is 0, and its logarithm is -inf."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        logits = m.inner(x)
        p = torch.sigmoid(logits)
        log = torch.log(1 - p) if bad else F.logsigmoid(-logits)
        return -(p**2) * log

    return Net(forward, inner=linear(16, 16, shift=11.0)), (torch.randn(4, 16),)


@failure("PyTorch, NLLLoss: log_softmax is more stable than log(softmax)", "", "AMP203", "half16")
def log_of_a_softmax(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        logits = m.head(x)
        return torch.log(torch.softmax(logits, -1)) if bad else torch.log_softmax(logits, -1)

    return Net(forward, head=linear(16, 16, gain=30.0)), (torch.randn(4, 16),)


@failure("ST-MoE, Zoph et al. 2022: the router z-loss, written out", "", "AMP107", "half16")
def router_z_loss(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        logits = m.router(x)
        total = torch.log(torch.exp(logits).sum(-1)) if bad else torch.logsumexp(logits, -1)
        return total.square()

    return Net(forward, router=linear(16, 8, shift=12.0)), (torch.randn(4, 16),)


@failure("PyTorch, Softplus: reverts to the linear function above a threshold", "", "AMP107", "half16")
def softplus_by_hand(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        delta = m.delta(x)
        return torch.log(1 + torch.exp(delta)) if bad else F.softplus(delta)

    return Net(forward, delta=linear(16, 16, shift=12.0)), (torch.randn(4, 16),)


@failure("Kingma and Welling 2014: the variance of an encoder is exp(logvar)", "", "AMP107", "half16")
def vae_log_variance(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        logvar = m.logvar(x)
        logvar = logvar if bad else logvar.clamp(-10, 5)
        return m.mean(x) + torch.exp(logvar)

    return Net(forward, logvar=linear(16, 16, shift=13.0), mean=linear(16, 16, gain=30.0)), (
        torch.randn(4, 16),
    )


@failure("CLIP, Radford et al. 2021: the logit scale is clipped at 100", "", "AMP107", "half16")
def clip_logit_scale(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        features = F.normalize(m.inner(x), dim=-1, eps=1e-3)
        scale = m.scale if bad else m.scale.clamp(max=4.6)
        return torch.exp(scale) * features

    model = Net(forward, inner=linear(16, 16), scale=torch.zeros(()))
    del model._buffers["scale"]
    model.scale = nn.Parameter(torch.tensor(12.0))
    return model, (torch.randn(4, 16),)


@failure(
    "ArcFace, Deng et al. 2019: InsightFace computes the angle in float32", "", "AMP115", "half16 halfbf"
)
def arcface_angle(bad: bool) -> Built:
    """asin for acos: the same domain."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        unit = F.normalize(x, dim=-1, eps=1e-3)
        cosine = (unit * unit).sum(-1) * 0.9999
        return torch.asin(cosine if bad else cosine.clamp(-0.9999, 0.9999))

    return Net(forward, inner=nn.Identity()), (torch.randn(512, 16),)


@failure("attention weights by hand: p / p.sum()", "", "AMP201", "half16")
def probabilities_that_vanish(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        weight = torch.exp(m.inner(x) - (20.0 if bad else 0.0))
        return weight / weight.sum(-1, keepdim=True)

    return Net(forward, inner=linear(16, 16)), (torch.randn(4, 16),)
