# source: pytorch/pytorch issue #38487
# mistake: a custom autograd Function is used under autocast without custom_fwd/custom_bwd; its matmul gives a half output in forward, and backward (outside autocast) multiplies the half gradient with float32 weights and raises
# severity: error
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class LowRankMM(Function):
    """y = x A B with the inner product recomputed in backward to save memory."""

    @staticmethod
    def forward(ctx, x, a, b):  # <- here
        ctx.save_for_backward(x, a, b)
        return x @ a @ b  # <- here

    @staticmethod
    @once_differentiable
    def backward(ctx, gy):  # <- here
        x, a, b = ctx.saved_tensors
        inner = x @ a
        gb = inner.t() @ gy  # <- here
        ginner = gy @ b.t()  # <- here
        ga = x.t() @ ginner
        gx = ginner @ a.t()
        return gx, ga, gb


class LowRankLinear(nn.Module):
    def __init__(self, fan_in, fan_out, rank):
        super().__init__()
        self.a = nn.Parameter(torch.empty(fan_in, rank))
        self.b = nn.Parameter(torch.empty(rank, fan_out))
        self.bias = nn.Parameter(torch.zeros(fan_out))
        nn.init.orthogonal_(self.a)
        nn.init.orthogonal_(self.b)

    def forward(self, x):
        lead = x.shape[:-1]
        y = LowRankMM.apply(x.reshape(-1, x.shape[-1]), self.a, self.b)  # <- here
        return y.view(*lead, -1) + self.bias


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim, rank):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(LowRankLinear(tokens, 2 * tokens, rank), nn.GELU(),
                                 LowRankLinear(2 * tokens, tokens, rank))
        self.ch = nn.Sequential(LowRankLinear(dim, 4 * dim, rank), nn.GELU(),
                                LowRankLinear(4 * dim, dim, rank))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class Forecaster(nn.Module):
    def __init__(self, history=336, horizon=96, series=64, dim=256, depth=4, rank=32):
        super().__init__()
        self.lift = nn.Linear(history, dim)
        self.blocks = nn.Sequential(*[MixerBlock(series, dim, rank) for _ in range(depth)])
        self.out = nn.Linear(dim, horizon)

    def forward(self, x):
        return self.out(self.blocks(self.lift(x.transpose(1, 2)))).transpose(1, 2)


def run(train_loader, val_loader, epochs=20, lr=1e-3, device="cuda"):
    net = Forecaster().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(epochs):
        net.train()
        for past, future in train_loader:
            past, future = past.to(device), future.to(device)
            opt.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                pred = net(past)
            loss = nn.functional.l1_loss(pred.float(), future)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        net.eval()
        with torch.no_grad():
            mae = [nn.functional.l1_loss(net(p.to(device)), f.to(device)).item() for p, f in val_loader]
        print(epoch, sum(mae) / len(mae))
    return net
