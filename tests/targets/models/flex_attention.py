import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention


def relative(score, b, h, q, k):
    return score + (q - k)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return flex_attention(q, k, v, score_mod=relative)


def get_model():
    return Attention()


def example_inputs():
    return torch.randn(1, 16, 32)
