import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if x.abs().max() > 1:
            x = x / x.abs().max()
        return self.linear(x)


def get_model():
    return Gate()


def example_inputs():
    return torch.randn(4, 8)
