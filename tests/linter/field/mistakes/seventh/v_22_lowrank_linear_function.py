# source: pytorch/pytorch issue #38487 https://github.com/pytorch/pytorch/issues/38487
# mistake: a custom autograd Function used under autocast lacks custom_fwd/custom_bwd, so its backward multiplies a half gradient with float32 tensors and raises
# severity: error
import torch
from torch import nn
from torch.autograd import Function


class ThinProduct(Function):
    """x @ a @ b that keeps only x and the two thin factors for the backward pass."""

    @staticmethod
    def forward(ctx, x, a, b):  # <- here
        ctx.save_for_backward(x, a, b)
        return torch.mm(torch.mm(x, a), b)

    @staticmethod
    def backward(ctx, grad):  # <- here
        x, a, b = ctx.saved_tensors
        gb = grad.mm(b.t())  # <- here
        return gb.mm(a.t()), x.t().mm(gb), torch.mm(x, a).t().mm(grad)


class ThinLinear(nn.Module):
    def __init__(self, i, o, rank):
        super().__init__()
        self.a = nn.Parameter(torch.randn(i, rank) / i ** 0.5)
        self.b = nn.Parameter(torch.randn(rank, o) / rank ** 0.5)
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return ThinProduct.apply(x, self.a, self.b) + self.bias


class TabularNet(nn.Module):
    def __init__(self, features, classes, width=2048, rank=64):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        self.first = ThinLinear(features, width, rank)
        self.second = ThinLinear(width, width, rank)
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        x = torch.relu(self.first(self.norm(x)))
        x = torch.relu(self.second(x))
        return self.last(x)


def fit(train, features, classes, epochs=20, use_amp=True):
    net = TabularNet(features, classes).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for epoch in range(epochs):
        good = n = 0
        for x, y in train:
            x, y = x.cuda(), y.cuda()
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
                logits = net(x)
                loss = nn.functional.cross_entropy(logits, y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            good += (logits.argmax(1) == y).sum().item()
            n += len(y)
        print(epoch, good / n)
    return net


if __name__ == "__main__":
    from clicks import table

    loader, f, c = table("clicks.parquet", batch=8192)
    fit(loader, f, c)
