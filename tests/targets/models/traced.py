import torch
from torch import nn


def get_model():
    return torch.jit.trace(nn.Sequential(nn.Linear(32, 64), nn.GELU()), torch.randn(4, 32))


def example_inputs():
    return torch.randn(4, 32)
