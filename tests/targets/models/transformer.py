import torch
from torch import nn


def get_model():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def example_inputs():
    return torch.randn(2, 10, 32)
