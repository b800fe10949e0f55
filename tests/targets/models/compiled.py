import torch
from torch import nn


def get_model():
    return torch.compile(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)))


def example_inputs():
    return torch.randn(4, 32)
