"""Small results of large operands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.silent.case import Built, Net, silent


@silent("half", "bfloat16", "AMP207")
def structural_similarity(bad: bool) -> Built:
    """E[x^2] - E[x]^2 over windows, and the loss made of it."""

    def forward(m: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not bad:
            x, y = x.float(), y.float()
        mx, my = F.avg_pool2d(x, 5), F.avg_pool2d(y, 5)
        vx = F.avg_pool2d(x * x, 5) - mx * mx  # culprit
        vy = F.avg_pool2d(y * y, 5) - my * my  # culprit
        cov = F.avg_pool2d(x * y, 5) - mx * my  # culprit
        return (2 * cov + 9e-4) / (vx + vy + 9e-4)

    image = 0.8 + 0.02 * torch.rand(2, 3, 30, 30)
    return Net(forward), (image, image + 0.002 * torch.rand_like(image))


@silent("half", "bfloat16", "AMP207")
def squared_distances(bad: bool) -> Built:
    """|x|^2 + |y|^2 - 2 x.y of points that are close to each other."""

    def forward(m: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if bad:
            cross = x @ y.t()  # culprit
            squares = (x * x).sum(-1)[:, None] + (y * y).sum(-1)  # culprit
            return squares - 2 * cross  # culprit
        return ((x.float()[:, None] - y.float()) ** 2).sum(-1)

    # exact in bfloat16, so that the inputs are not at fault
    x = (torch.randint(0, 8, (16, 8)) / 8.0) + 10.0
    y = (torch.randint(0, 8, (16, 8)) / 8.0) + 10.0
    return Net(forward), (x, y)


@silent("half", "float16", "AMP207")
def cosine_distance(bad: bool) -> Built:
    """1 - cos of embeddings that nearly agree."""

    def forward(m: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not bad:
            x, y = x.float(), y.float()
        similarity = (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1)  # culprit
        return 1 - similarity

    x = torch.randint(1, 64, (32, 64)) / 16.0
    return Net(forward), (x, x + torch.randint(-1, 2, (32, 64)) / 16.0)


@silent("half", "bfloat16", "AMP207")
def hand_made_log_sum_exp(bad: bool) -> Built:
    """The maximum is added back before the target's logit is taken away."""

    def forward(m: Net, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wide = logits if bad else logits.float()
        top = wide.amax(-1, keepdim=True)
        total = top + (wide - top).exp().sum(-1, keepdim=True).log()  # culprit
        return (total - wide.gather(-1, targets[:, None])).squeeze(-1)

    logits = 1000.0 + 8.0 * torch.randint(-3, 1, (64, 50))
    return Net(forward), (logits, logits.argmax(-1))


@silent("half", "float16", "AMP207")
def error_where_finite(bad: bool) -> Built:
    """A derivative by a difference quotient with a step that is small for 16 bits."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        wide = x if bad else x.float()
        step = 2.0**-8
        left, right = (wide - step).square() + 3, (wide + step).square() + 3  # culprit
        return (right - left) / (2 * step)

    return Net(forward), (torch.randint(-64, 64, (64, 8)) / 64.0,)


@silent("half", "bfloat16", "AMP207")
def low_temperature(bad: bool) -> Built:
    """Logits that are rounded, and then divided by a temperature of 0.02."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        given = (x, m.head.weight, m.head.bias)
        scores = F.linear(*(given if bad else (t.float() for t in given)))  # culprit
        return torch.softmax(scores.float() / 0.02, -1)

    head = nn.Linear(16, 32)
    with torch.no_grad():
        head.weight.copy_(torch.randint(-32, 33, (32, 16)) / 32.0)
        head.bias.fill_(20.0)
    return Net(forward, head=head), (torch.randint(-16, 17, (32, 16)) / 64.0,)
