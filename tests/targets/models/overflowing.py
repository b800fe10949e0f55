import torch
from torch import nn


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(64, 256)
        self.wo = nn.Linear(256, 64)

    def forward(self, x):
        return x + self.wo((300 * self.wi(x)).relu())


def get_model():
    torch.manual_seed(0)
    model = FeedForward()
    with torch.no_grad():
        model.wo.weight.mul_(160)
    return model


def example_inputs():
    return 3 * torch.randn(2, 5, 64)
