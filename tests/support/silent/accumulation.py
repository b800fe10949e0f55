"""Sums that stop growing, products that vanish, counters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.silent.case import Built, Net, silent


@silent("half", "bfloat16", "AMP210")
def counter_in_a_loop(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        count = torch.zeros((), dtype=x.dtype if bad else torch.float32)
        for _ in range(320):
            count = count + 1  # culprit
        return x / count.to(x.dtype)

    return Net(forward), (torch.ones(4, 8),)


@silent("half", "bfloat16", "AMP210")
def counter_in_a_buffer(bad: bool) -> Built:
    """300 + 1 is 300: the schedule that hangs on the counter stands still."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        m.steps += 1  # culprit
        return m.inner(x)

    steps = torch.tensor(300.0) if bad else torch.tensor(300)
    return Net(forward, inner=nn.Linear(8, 8), steps=steps), (torch.randn(4, 8),)


@silent("half", "bfloat16", "AMP210")
def running_mean_by_hand(bad: bool) -> Built:
    """A mean over many steps: what is added becomes too small for what is there."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape[1:], dtype=x.dtype if bad else torch.float32)
        for index in range(x.shape[0]):
            total = total + x[index]  # culprit
        return total / x.shape[0]

    return Net(forward), (torch.ones(700, 4) + torch.rand(700, 4),)


@silent("half", "float16", "AMP207")
def tiny_probabilities(bad: bool) -> Built:
    """Products of probabilities below 6e-8 are zero."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        p = F.softmax(x if bad else x.float(), -1)
        joint = p[:, :, None] * p[:, None, :] * 1e-4  # culprit
        return joint

    return Net(forward), (torch.randn(8, 100),)


@silent("half", "float16", "AMP207")
def noise_schedule(bad: bool) -> Built:
    """The running product of 1 - beta, as a diffusion schedule makes it."""

    def forward(m: Net, betas: torch.Tensor) -> torch.Tensor:
        wide = betas if bad else betas.float()
        alphas = 1 - wide  # culprit
        kept = alphas.cumprod(-1)
        return 1 - kept

    return Net(forward), (torch.full((1, 100), 0.75 * 2.0**-11),)


@silent("half", "bfloat16", "AMP207")
def exponential_average(bad: bool) -> Built:
    """The decay rounds to 1, and the average never forgets."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        average = torch.ones(x.shape[1:], dtype=x.dtype if bad else torch.float32) * 4
        for index in range(x.shape[0]):
            average = average * 0.9985 + x[index] * 0.0015  # culprit
        return average

    return Net(forward), (torch.ones(200, 4),)
