import torch


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def quantised(model, x):
    with torch.autocast("cuda", dtype=torch.float16):
        return StraightThrough.apply(model(x))
