import torch
from torch import nn


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x, cache):
        q, k, v = self.qkv(x).chunk(3, -1)
        keys, values = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
        out = nn.functional.scaled_dot_product_attention(q, keys, values)
        return out, {"k": keys, "v": values}


def get_model():
    return Step()


def example_inputs():
    return torch.randn(1, 1, 32), {"k": torch.randn(1, 7, 32), "v": torch.randn(1, 7, 32)}
