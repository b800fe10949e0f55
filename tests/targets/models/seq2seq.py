import torch
from torch import nn


def get_model():
    return nn.Transformer(32, 4, 1, 1, 64, batch_first=True).eval()


def example_inputs():
    return {"src": torch.randn(2, 9, 32), "tgt": torch.randn(2, 7, 32)}
