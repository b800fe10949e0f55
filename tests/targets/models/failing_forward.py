import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(64, 8)

    def forward(self, x):
        return self.second(self.first(x))


def get_model():
    return Net()


def example_inputs():
    return torch.randn(4, 16)
