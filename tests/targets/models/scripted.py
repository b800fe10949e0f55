import torch
from torch import nn


def get_model():
    return torch.jit.script(nn.Sequential(nn.Linear(32, 64), nn.GELU()))


def example_inputs():
    return torch.randn(4, 32)
