# why correct: the custom Function is decorated with custom_fwd/custom_bwd, so forward and backward run under the same autocast state, and gradients are cast to the dtype of their inputs
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class ReversibleCouple(torch.autograd.Function):
    """y1 = x1 + W x2, y2 = x2; only what backward needs is kept."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, x1, x2, w):
        ctx.save_for_backward(x2, w)
        ctx.kinds = (x1.dtype, x2.dtype, w.dtype)
        return x1 + x2 @ w.t()

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, gy):
        x2, w = ctx.saved_tensors
        k1, k2, kw = ctx.kinds
        g2 = gy @ w
        gw = gy.flatten(0, -2).t() @ x2.flatten(0, -2)
        return gy.to(k1), g2.to(k2), gw.to(kw)


class StableLog(torch.autograd.Function):
    """log with a bounded gradient; always float32."""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        x = x.clamp(min=1e-12)
        ctx.save_for_backward(x)
        return x.log()

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g / x.clamp(min=1e-3)


class Couple(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, d) * d**-0.5)
        self.norm = nn.LayerNorm(d)

    def forward(self, a, b):
        return ReversibleCouple.apply(a, torch.tanh(self.norm(b)), self.w), b


class MixtureDensity(nn.Module):
    def __init__(self, fan_in=16, d=128, depth=6, k=8):
        super().__init__()
        self.lift = nn.Linear(fan_in, 2 * d)
        self.layers = nn.ModuleList(Couple(d) for _ in range(depth))
        self.logit, self.mu, self.rho = nn.Linear(2 * d, k), nn.Linear(2 * d, k), nn.Linear(2 * d, k)

    def forward(self, x):
        a, b = self.lift(x).chunk(2, -1)
        for layer in self.layers:
            a, b = layer(a, b)
            a, b = b, a
        h = torch.cat([a, b], -1)
        return self.logit(h).float(), self.mu(h).float(), self.rho(h).float()


def nll(params, y):
    logit, mu, rho = params
    var = nn.functional.softplus(rho) + 1e-4
    density = torch.exp(-0.5 * (y[:, None] - mu) ** 2 / var) / (6.2832 * var).sqrt()
    return -StableLog.apply((logit.softmax(-1) * density).sum(-1)).mean()


def fit(loader, epochs=30):
    net = MixtureDensity().cuda()
    opt = torch.optim.NAdam(net.parameters(), lr=5e-4)
    scaler = torch.amp.GradScaler("cuda")
    for e in range(epochs):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                params = net(x.cuda())
            loss = nll(params, y.cuda().float())
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(e, loss.item(), scaler.get_scale())
    return net
