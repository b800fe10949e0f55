import torch
from torch import nn


def get_model():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).half()


def example_inputs():
    return torch.randn(4, 32, dtype=torch.float16)
