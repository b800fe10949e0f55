import torch
from torch import nn


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        x = self.linear(x)
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


def get_model():
    return Running()


def example_inputs():
    return torch.randn(4, 16)
